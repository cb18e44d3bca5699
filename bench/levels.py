"""Adaptive against fixed draft lengths at set levels of acceptance, at a size that people use.

Weights of 1.1 B parameters that say something are not at hand, so their acceptance is simulated
(`bench.simulated`); what passes cost is real. Every table says so.

Random weights have many near-ties, so in default mode a text soon leaves the continuation that
the drafter knows. All runs are in exact mode, plain decoding's too, whose passes are then two
tokens wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from bench import speculation
from bench.models import BenchModel, Progress
from bench.outcome import Outcome
from bench.prompts import Prompt
from bench.report import Chart, Series, Table, Wanted, spread, wanted_table
from bench.simulated import SimulatedDrafter
from bench.speculation import PLAIN, Config, Measured, Runner
from bench.stats import Summary, ratios

_OF_BEST, _OF_PLAIN = 0.95, 0.97
_ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `each` prompts at every level with every length."""

    each: int
    sizes: speculation.Plan
    levels: tuple[float, ...] = (0.9, 0.7, 0.5, 0.3, 0.0)
    lengths: tuple[int, ...] = (1, 2, 4, 8)


# As many prompts as ways: each way is measured at each place of a turn.
FULL = Plan(6, speculation.Plan(new_tokens=64, exact=True))
QUICK = Plan(1, speculation.Plan(new_tokens=16, exact=True), levels=(0.9, 0.0), lengths=(1, 3))

# One run: per level, per configuration, the figures with seconds and tokens per jump.
Levels = dict[str, dict[str, dict[str, Any]]]


def run(
    model: BenchModel,
    prompts: Sequence[Prompt],
    plan: Plan,
    progress: Progress,
    earlier: Sequence[Levels] = (),
) -> Outcome:
    """Measure all levels; `earlier` runs of the same plan are shown together with this one."""
    runner = Runner.load(model)
    if runner.engine.info.exact_align is None:  # figures with `lost` above 0 say so
        plan = replace(plan, sizes=replace(plan.sizes, exact=False))
    known = _known(runner, prompts, plan)
    levels: Levels = {}
    for acceptance in plan.levels:
        measured = _measure(runner, known, acceptance, plan)
        levels[f"{acceptance:g}"] = _figures(measured, plan)
        progress(f"simulated acceptance {acceptance:g}: {len(measured.prompts)} prompts")
    return outcome(model, [*earlier, levels], plan)


def _known(
    runner: Runner, prompts: Sequence[Prompt], plan: Plan
) -> list[tuple[Prompt, tuple[int, ...]]]:
    """Prompts with what the target makes of them."""
    sizes = plan.sizes
    return [
        (prompt, runner.run(prompt, PLAIN, sizes.new_tokens, exact=sizes.exact).tokens)
        for prompt in prompts[: plan.each]
    ]


def _measure(
    runner: Runner,
    known: Sequence[tuple[Prompt, tuple[int, ...]]],
    acceptance: float,
    plan: Plan,
) -> Measured:
    engine = runner.engine
    drafter = SimulatedDrafter(acceptance, vocab_size=engine.info.vocab_size)
    for prompt, tokens in known:
        drafter.know(engine.encode(prompt.text), tokens)
    engine.scheduler.drafters = {drafter.name: drafter}
    longest = max(plan.lengths)
    ways = [Config(drafter.name, k) for k in plan.lengths]
    ways.append(Config(drafter.name, longest, adaptive=True))
    anew = Runner(engine, longest)  # nothing is known of other levels
    prompts = [prompt for prompt, _ in known]
    return speculation.measure(anew, ways, prompts, plan.sizes, lambda text: None)


def _figures(measured: Measured, plan: Plan) -> dict[str, dict[str, Any]]:
    figures = {}
    for (config, runs), row in zip(measured.runs.items(), measured.rows(), strict=True):
        name = _ADAPTIVE if config.adaptive else f"k={config.k}"
        figures[name] = {
            "decode_seconds": [run.stats.decode_seconds for run in runs],
            "tokens": plan.sizes.new_tokens - 1,
            "acceptance": row.acceptance,
            "tokens_per_jump": row.tokens_per_jump,
            "lost": sum(run.stats.draft_misses for run in runs),
        }
    return figures


def outcome(model: BenchModel, runs: Sequence[Levels], plan: Plan) -> Outcome:
    """Tables and a chart of all runs."""
    rows, judged, wanted = [], [], []
    charted: dict[str, list[Summary]] = {}
    for level in runs[0]:
        found = [run[level] for run in runs]
        names = list(found[0])
        for name in names:
            of_plain = _pooled(found, "k=0", name)
            charted.setdefault(name, []).append(of_plain)
            rows.append((level, name, *_cells(found, name, of_plain)))
        best = max(
            (name for name in names if name != _ADAPTIVE),
            key=lambda name: _pooled(found, "k=0", name).median,
        )
        of_best, of_plain = _pooled(found, best, _ADAPTIVE), _pooled(found, "k=0", _ADAPTIVE)
        judged.append(
            (
                level, best, spread(of_best, 3), _range(found, best), spread(of_plain, 3),
                _range(found, "k=0"),
            )
        )  # fmt: skip
        wanted += [
            Wanted(f"simulated acceptance {level}: of the best fixed length, {best}", _OF_BEST,
                   of_best.median),
            Wanted(f"simulated acceptance {level}: of plain decoding", _OF_PLAIN, of_plain.median),
        ]  # fmt: skip
    how = (
        f"{len(runs)} runs of {plan.each} prompts, {plan.sizes.new_tokens} new tokens each, one "
        "stream, greedy, lengths in turns for every prompt; guesses cost nothing to make",
        "simulated acceptance: the drafter knows the target's own continuation and errs with the "
        "probability that the level leaves; what passes cost is real; all in exact mode, plain too",
    )
    tables = [
        Table(
            f"Adaptive at simulated acceptance: {model.title}",
            ("acceptance", "best fixed", "adaptive of the best", "runs", "adaptive of plain",
             "runs"),
            judged,
            (*how, "medians of ratios per prompt with quartiles; runs: lowest to highest median of "
             "a single run; best fixed: no guesses (k=0) is one of the choices"),
        ),
        wanted_table("Wanted at simulated acceptance", wanted),
        Table(
            f"Draft lengths at simulated acceptance: {model.title}",
            ("acceptance", "guesses", "accepted", "tok/jump", "tok/s", "speedup", "lost"),
            rows,
            (*how, "lost: steps in which the text had left the known continuation"),
        ),
    ]  # fmt: skip
    series = [
        Series(name, [s.median for s in sums], [s.low for s in sums], [s.high for s in sums])
        for name, sums in charted.items()
        if name != "k=0"
    ]
    chart = Chart(
        f"Simulated acceptance: {model.title}", "lines", "simulated acceptance",
        "times plain decoding", list(runs[0]), series, level=1.0,
    )  # fmt: skip
    result = {
        "model": model.key,
        "simulated_acceptance": True,
        "runs": list(runs),
        "wanted": [asdict(line) for line in wanted],
    }
    return Outcome(result, tables, [chart])


Found = Sequence[Mapping[str, Mapping[str, Any]]]  # one level, run by run


def _ratios(figures: Mapping[str, Mapping[str, Any]], base: str, name: str) -> list[float]:
    return ratios(figures[base]["decode_seconds"], figures[name]["decode_seconds"])


def _pooled(found: Found, base: str, name: str) -> Summary:
    """Time of `base` over that of `name`, per prompt, over all runs."""
    return Summary.of([ratio for run in found for ratio in _ratios(run, base, name)])


def _range(found: Found, base: str) -> str:
    single = [median(_ratios(run, base, _ADAPTIVE)) for run in found]
    return f"{min(single):.3f}\N{EN DASH}{max(single):.3f}"


def _cells(found: Found, name: str, of_plain: Summary) -> tuple[str, ...]:
    figures = [run[name] for run in found]
    seconds = [second for item in figures for second in item["decode_seconds"]]
    return (
        f"{median(item['acceptance'] for item in figures):.1%}" if name != "k=0" else "",
        f"{median(item['tokens_per_jump'] for item in figures):.2f}",
        f"{figures[0]['tokens'] / median(seconds):.1f}",
        spread(of_plain) if name != "k=0" else "",
        str(sum(item["lost"] for item in figures)),
    )
