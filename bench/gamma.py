"""Fixed draft lengths: what 0 to 8 draft tokens per step bring, drafter by drafter, on code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import speculation
from bench.models import BenchModel, Progress
from bench.outcome import Outcome
from bench.prompts import Prompt
from bench.report import Chart, Series, Table
from bench.speculation import COLUMNS, HOW, PLAIN, Config, Measured, Runner

LENGTHS = tuple(range(1, 9))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `each` prompts, with each of `lengths`."""

    each: int
    sizes: speculation.Plan
    lengths: tuple[int, ...] = LENGTHS


FULL = Plan(20, speculation.Plan(new_tokens=128, rounds=2))
QUICK = Plan(2, speculation.Plan(new_tokens=16), lengths=(1, 4))


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan, progress: Progress) -> Outcome:
    """Measure every drafter with every length, and adaptively."""
    runner = Runner.load(model)
    measured = speculation.measure(
        runner, runner.ways(*plan.lengths), prompts, plan.sizes, progress
    )
    return outcome(model, measured, plan)


def outcome(model: BenchModel, measured: Measured, plan: Plan) -> Outcome:
    """The table, and speed and acceptance over the draft length."""
    rows = measured.rows()
    prompts = len(measured.prompts) // plan.sizes.rounds
    table = Table(
        f"Draft lengths: {model.title}",
        ("drafter", *COLUMNS),
        [(row.label, *row.cells) for row in rows],
        (
            f"{prompts} prompts of code, {plan.sizes.new_tokens} new tokens each, "
            f"{plan.sizes.rounds} rounds, one stream, greedy",
            *HOW,
        ),
    )
    places = [str(config.k) for config in (PLAIN, *(Config("", k) for k in plan.lengths))]
    speed, accepted = [], []
    for name in dict.fromkeys(row.drafter for row in rows if row.k):
        fixed = [row for row in rows if row.drafter == name and not row.adaptive]
        found = speculation.speedups(name, fixed)
        speed.append(Series(name, (1.0, *found.values), (1.0, *found.low), (1.0, *found.high)))
        (adaptive,) = [row.speedup.median for row in rows if row.drafter == name and row.adaptive]
        speed.append(Series(f"{name}, adaptive", [adaptive] * len(places)))
        accepted.append(Series(name, (None, *(row.acceptance for row in fixed))))
    charts = [
        Chart("Speed over plain decoding", "lines", "draft tokens per step (k)",
              "times plain decoding", places, speed, level=1.0),
        Chart("Accepted draft tokens", "lines", "draft tokens per step (k)",
              "share of the draft tokens", places, accepted),
    ]  # fmt: skip
    result = {
        "model": model.key,
        "prompts": prompts,
        "new_tokens": plan.sizes.new_tokens,
        "rounds": plan.sizes.rounds,
        "configs": speculation.result(measured),
    }
    return Outcome(result, [table], charts)
