"""What layers with a state cost: requests at once, and prompts whose states fade.

Qwen3.5 0.8B's shape beside Qwen3 0.6B's, with random weights: each of eight requests at once reads
and writes states of its own, where attention reads keys and values of 1,000 tokens. And a prompt
of which the states of all layers fade, because of zeros, beside one of random tokens: processors
compute numbers near zero, denormal ones, up to a hundred times as slowly.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

from bench.memory.shapes import loaded
from bench.models import FADING
from bench.tools.quiet import Case, Turns
from bench.tools.report import Outcome, Summary, Table, Target, ratios

_STATES, _ATTENTION = "Qwen3.5 0.8B", "Qwen3 0.6B"
_SHAPES = {_STATES: FADING, _ATTENTION: "Qwen/Qwen3-0.6B"}
_AT_ONCE, _PAST = 8, 1000  # requests, tokens behind each
_PROMPT, _ZEROS = 1000, 990  # tokens
_MIN_RATE = 0.8  # of the tokens per second without states
_MAX_TIME = 1.2  # of any other prompt's
_STEP, _FADES, _LASTS = "eight requests", "a prompt that fades", "a random prompt"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    steps: int  # of a side in a round; its time is their median


FULL, QUICK = Plan(rounds=11, steps=12), Plan(rounds=1, steps=2)


def run(options: argparse.Namespace, plan: Plan) -> Outcome:
    """Measure requests at once on both shapes in turn, then both prompts on the one with states."""
    together, prompts = Turns(), Turns()
    step = {"streams": _AT_ONCE, "draft_tokens": 0, "steps": plan.steps, "past": _PAST}
    cases = [
        Case(name, lambda worker, zeros=zeros: worker.ask("prompt", tokens=_PROMPT, zeros=zeros))
        for name, zeros in ((_FADES, _ZEROS), (_LASTS, 0))
    ]
    with loaded(_SHAPES, options.cache, slots=_AT_ONCE, context=2 * _PAST) as workers:
        together.measure(
            workers, [Case(_STEP, lambda worker: worker.ask("steps", **step))], plan.rounds
        )
        prompts.measure({_STATES: workers[_STATES]}, cases, plan.rounds)
    return outcome(together, prompts, plan)


def outcome(together: Turns, prompts: Turns, plan: Plan) -> Outcome:
    """Two rows and their targets."""
    steps = together.ms[_STEP]
    rate = Summary.of(ratios(steps[_ATTENTION], steps[_STATES]))
    fades, lasts = (prompts.ms[name][_STATES] for name in (_FADES, _LASTS))
    share = Summary.of(ratios(fades, lasts))
    rows = [
        (
            f"a token each of {_AT_ONCE} requests behind {_PAST:,} tokens",
            *(f"{name}: {Summary.of(steps[name]).spread(1)}" for name in _SHAPES),
            f"tokens per second {rate.spread()}",
        ),
        (
            f"a prompt of {_PROMPT:,} tokens, {_STATES}",
            f"the last {_ZEROS} zeros: {Summary.of(fades).spread(0)}",
            f"random tokens: {Summary.of(lasts).spread(0)}",
            f"time {share.spread()}",
        ),
    ]
    notes = (
        f"shapes with random weights in int4, blocks of 128; medians with quartiles of "
        f"{plan.rounds} rounds; ratios round by round, of the first to the second",
        together.note,
    )
    table = Table("Layers with a state", ("what", "ms", "ms", "ratio"), rows, notes)
    targets = [
        Target("eight requests: tokens per second of Qwen3's", _MIN_RATE, rate.median),
        Target("a prompt that fades: time of another's", _MAX_TIME, share.median, at_most=True),
    ]
    result = {"plan": asdict(plan), "ms": {"at once": steps, "prompts": prompts.ms}}
    return Outcome(result, [table], targets=targets)
