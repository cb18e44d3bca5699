"""What a guess of a draft head costs beside its target's pass over one token.

Qwen3 4B with the published EAGLE-3 head that its preset names, and Qwen3.5 0.8B with its own MTP
block, in their whole shapes with random weights. Target and head run in turn, each over one token
with a past. What a head does with tokens that were accepted is no part of a guess.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from bench.memory.capped import HEADS, PUBLISHED, WEIGHTS
from bench.models import chosen, head_shape, plain, shape
from bench.tools.report import Outcome, Summary, Table, Target, progress, ratios
from specops.engine.loading import load_models
from specops.runtime.batch import Batch
from specops.runtime.model_runner import ModelRunner
from specops.speculation.drafters.eagle import EagleDrafter

_PAST = 200  # tokens
_MOST = 0.12  # of a pass
Seconds = tuple[list[float], list[float]]
"""Of passes of the target and of the head."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each pass is timed, after some that are not."""

    rounds: int
    warm_up: int = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """A published model, its weights, and the head beside it; empty: its own MTP block."""

    target: str
    quant: str
    head: str = ""


PAIRS = {
    "qwen3-4b": Pair(PUBLISHED["qwen3-4b"], WEIGHTS["int4"], HEADS["qwen3-4b"]),
    "qwen3.5-0.8b": Pair("Qwen/Qwen3.5-0.8B", WEIGHTS["int8"]),
}
FULL, QUICK = Plan(rounds=41), Plan(rounds=3)


def run(options: argparse.Namespace, plan: Plan) -> Outcome:
    """Measure the pairs whose names contain `--only`, one after the other."""
    found = {}
    for name in chosen(PAIRS, options.only):
        pair, cache = PAIRS[name], options.cache
        target = shape(pair.target, pair.quant, cache)
        head = str(head_shape(pair.head, cache)) if pair.head else ""
        settings = replace(plain(target, cache / "guess"), draft=head, slots=1)
        models = load_models(settings, lambda state, detail, download=None: progress(detail))
        drafter = models.head.drafter if models.head else None
        if not isinstance(drafter, EagleDrafter):
            raise RuntimeError(f"{name} was loaded without a head")
        found[name] = measure(models.target.runner, drafter.runner, plan)
    return outcome(found, plan)


def measure(target: ModelRunner, head: ModelRunner, plan: Plan) -> Seconds:
    """The seconds of both passes, round by round."""
    sides = one_token(target), one_token(head)
    seconds: Seconds = ([], [])
    for number in range(plan.warm_up + plan.rounds):
        for work, found in zip(sides, seconds, strict=True):
            begun = time.perf_counter()
            work()
            if number >= plan.warm_up:
                found.append(time.perf_counter() - begun)
    return seconds


def outcome(found: Mapping[str, Seconds], plan: Plan) -> Outcome:
    """A row and a target for each pair."""
    rows, targets = [], []
    for name, (base, guess) in found.items():
        share = Summary.of(ratios(guess, base))
        times = (Summary.of(seconds).spread(2, 1e3) for seconds in (base, guess))
        rows.append((name, *times, share.spread(3)))
        targets.append(Target(f"{name}: a guess, of a pass", _MOST, share.median, at_most=True))
    notes = (f"medians and quartiles of {plan.rounds} rounds; {_PAST} tokens of past",)
    columns = ("model", "one token, ms", "a guess, ms", "a guess ÷ one token")
    table = Table("A guess beside a pass over one token", columns, rows, notes)
    return Outcome({"plan": asdict(plan), "seconds": found}, [table], targets=targets)


def one_token(runner: ModelRunner) -> Callable[[], object]:
    """A pass over one token with a past."""
    runner.cache.allocate(0, [1], share=False)
    runner.cache.reserve(0, _PAST + 1)
    runner.cache.zero(0)  # of layers with a state, too
    batch = Batch()
    batch.add(0, _PAST, [1], 1)
    return lambda: runner.forward(batch)
