"""What a guess of a draft head costs beside its target's pass over one token.

Qwen3 4B and the published EAGLE-3 head that its preset names, both in their whole shapes with
random weights. Target and head run in turn, each over one token with a past. What a head does with
tokens that were accepted is no part of a guess.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.memory.capped import HEADS, PUBLISHED
from bench.models import head_shape, plain, shape
from bench.tools.report import Outcome, Summary, Table, Target, progress, ratios
from specops.engine.loading import load_models
from specops.runtime.batch import Batch
from specops.runtime.model_runner import ModelRunner
from specops.speculation.drafters.eagle import EagleDrafter

_MODEL = "qwen3-4b"
_WEIGHTS = "int4-128-mixed-rtn"  # the preset's, but for calibration, which changes no sizes
_PAST = 200  # tokens
_MOST = 0.12  # of a pass


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each pass is timed, after some that are not."""

    rounds: int
    warm_up: int = 3


FULL, QUICK = Plan(rounds=41), Plan(rounds=3)


def run(plan: Plan, cache: Path) -> Outcome:
    """Load the pair and time both in turn."""
    target = shape(PUBLISHED[_MODEL], _WEIGHTS, cache)
    head = head_shape(HEADS[_MODEL], cache)
    settings = replace(plain(target, cache / "guess"), draft=str(head), slots=1)
    models = load_models(settings, lambda state, detail, download=None: progress(detail))
    drafter = models.head.drafter if models.head else None
    if not isinstance(drafter, EagleDrafter):
        raise RuntimeError(f"{head} was not loaded as an EAGLE-3 head")
    return measure(models.target.runner, drafter.runner, plan)


def measure(target: ModelRunner, head: ModelRunner, plan: Plan) -> Outcome:
    """The milliseconds of each pass, and what a guess takes of the target's."""
    sides = {"target, one token": one_token(target), "head, a guess": one_token(head)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(plan.warm_up + plan.rounds):
        for name, work in sides.items():
            begun = time.perf_counter()
            work()
            if number >= plan.warm_up:
                seconds[name].append(time.perf_counter() - begun)
    base, guess = seconds.values()
    share = Summary.of(ratios(guess, base))
    rows = [
        (name, Summary.of(found).spread(2, 1e3), Summary.of(ratios(found, base)).spread(3))
        for name, found in seconds.items()
    ]
    notes = (f"medians and quartiles of {plan.rounds} rounds; {_PAST} tokens of past",)
    table = Table("A guess beside a pass", ("pass", "ms", "of the target's"), rows, notes)
    line = Target("a guess, of a one-token pass", _MOST, share.median, at_most=True)
    result = {"plan": asdict(plan), "seconds": seconds}
    return Outcome(result, [table], targets=[line])


def one_token(runner: ModelRunner) -> Callable[[], object]:
    """A pass over one token with a past."""
    runner.cache.begin(0, [1], share=False)
    runner.cache.reserve(0, _PAST + 1)
    batch = Batch()
    batch.add(0, _PAST, [1], 1)
    return lambda: runner.forward(batch)
