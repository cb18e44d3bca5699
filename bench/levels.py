"""Adaptive against fixed draft lengths at set levels of acceptance, at a size that people use.

Weights of 1.1 B parameters that say something are not at hand, so their acceptance is simulated
(`bench.simulated`); what passes cost is real. Every table says so. With one request and with
several at once; prompts come from the prefix cache, so that what is timed is decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from bench.batches import HOW, Batch, run_batch
from bench.models import BenchModel, Progress
from bench.outcome import Outcome
from bench.prompts import Prompt
from bench.quiet import settle
from bench.report import Chart, Series, Table, Wanted, spread, wanted_table
from bench.simulated import SimulatedDrafter
from bench.speculation import PLAIN, Config, Runner
from bench.stats import Summary, ratios, rotated

_OF_BEST, _NO_LOSS = 0.95, 0.97
# Of plain decoding, by requests at once and simulated acceptance; elsewhere nothing may be lost.
_OF_PLAIN = {(4, "0.9"): 1.35, (8, "0.9"): 1.2, (4, "0.7"): 1.15}
_PLAIN, _ADAPTIVE = "k=0", "adaptive"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        each: prompts, at least as many as requests at once; in batches of `loads` requests.
        new_tokens: of each.
        rounds: on all prompts, by requests at once.
        levels: of simulated acceptance.
        lengths: draft lengths for one request.
        shared_lengths: for several at once.
    """

    each: int
    new_tokens: int
    rounds: Mapping[int, int]
    levels: tuple[float, ...] = (0.9, 0.7, 0.5, 0.3, 0.0)
    lengths: tuple[int, ...] = (1, 2, 4, 8)
    shared_lengths: tuple[int, ...] = (1, 3)

    @property
    def longest(self) -> int:
        """Most draft tokens of a request and step."""
        return max(*self.lengths, *self.shared_lengths)

    def ways(self, drafter: str, load: int) -> list[Config]:
        """Plain decoding, each fixed length and adaptive."""
        lengths = self.lengths if load == 1 else self.shared_lengths
        fixed = (Config(drafter, k) for k in lengths)
        return [PLAIN, *fixed, Config(drafter, self.longest, adaptive=True)]


FULL = Plan(8, 64, rounds={1: 1, 4: 4, 8: 6})
QUICK = Plan(2, 16, rounds={1: 1, 2: 1}, levels=(0.9, 0.0), lengths=(1, 3))

# Seconds of decoding, tokens and steps of every batch, and how often the drafter was lost.
Figures = dict[str, Any]
# One run: by requests at once, acceptance and way of decoding.
Levels = dict[str, dict[str, dict[str, Figures]]]


def run(
    model: BenchModel,
    prompts: Sequence[Prompt],
    plan: Plan,
    progress: Progress,
    earlier: Sequence[Levels] = (),
) -> Outcome:
    """Measure all levels; `earlier` runs of the same plan are shown together with this one."""
    settings = replace(
        model.settings,
        slots=max(plan.rounds),
        prefix_cache="all",
        max_k_draft=max(model.settings.max_k_draft, plan.longest),
    )
    runner = Runner.load(replace(model, settings=settings))
    known = [
        (prompt, runner.run(prompt, PLAIN, plan.new_tokens).tokens)
        for prompt in prompts[: plan.each]
    ]
    found: Levels = {}
    for load in plan.rounds:
        for acceptance in plan.levels:
            level = _measure(runner, known, acceptance, load, plan)
            found.setdefault(str(load), {})[f"{acceptance:g}"] = level
            progress(f"{load} at once, simulated acceptance {acceptance:g}")
    return outcome(model, [*earlier, found], plan)


def _measure(
    runner: Runner,
    known: Sequence[tuple[Prompt, tuple[int, ...]]],
    acceptance: float,
    load: int,
    plan: Plan,
) -> dict[str, Figures]:
    engine = runner.engine
    drafter = SimulatedDrafter(acceptance, vocab_size=engine.info.vocab_size)
    for prompt, tokens in known:
        drafter.know(engine.encode(prompt.text), tokens)
    engine.scheduler.drafters[drafter.name] = drafter
    anew = Runner(engine, plan.longest)  # its controllers know nothing of other levels
    ways = plan.ways(drafter.name, load)
    prompts = [prompt for prompt, _ in known]
    batches = [prompts[start : start + load] for start in range(0, len(prompts), load)]
    batches = [batch for batch in batches if len(batch) == load]
    figures: dict[str, Figures] = {_name(way): _empty() for way in ways}
    settle()
    for turn in range(-1, plan.rounds[load]):  # the first is not counted: pages fault in
        for number, batch in enumerate(batches if turn >= 0 else batches[:1]):
            for way in rotated(ways, turn + number):
                lost = drafter.lost
                done = run_batch(anew, way, batch, plan.new_tokens)
                if turn >= 0:
                    _add(figures[_name(way)], done, drafter.lost - lost)
    return figures


def _name(way: Config) -> str:
    return _ADAPTIVE if way.adaptive else f"k={way.k}"


def _empty() -> Figures:
    return {"decode_seconds": [], "tokens": [], "steps": [], "lost": 0}


def _add(figures: Figures, done: Batch, lost: int) -> None:
    figures["decode_seconds"].append(done.decode_seconds)
    figures["tokens"].append(done.tokens)
    figures["steps"].append(done.steps)
    figures["lost"] += lost


def outcome(model: BenchModel, runs: Sequence[Levels], plan: Plan) -> Outcome:
    """Tables and charts of all runs."""
    rows, judged, wanted, charts = [], [], [], []
    for load, levels in runs[0].items():
        charted: dict[str, list[Summary]] = {}
        for level in levels:
            found = [run[load][level] for run in runs]
            for name in found[0]:
                of_plain = _pooled(found, _PLAIN, name)
                charted.setdefault(name, []).append(of_plain)
                rows.append((load, level, name, *_cells(found, name, of_plain)))
            judged.append((load, level, *_judged(found)))
            wanted += _wanted(load, level, found)
        charts.append(_chart(load, list(levels), charted))
    how = (
        f"{len(runs)} runs of {plan.each} prompts, {plan.new_tokens} new tokens each, greedy, in "
        "batches of as many as are asked at once, lengths in turns for every batch; draft tokens "
        "cost nothing to make, prompts come from the prefix cache",
        "simulated acceptance: the drafter knows the target's own continuation and errs with the "
        "probability that the level leaves; what passes cost is real",
    )
    tables = [
        Table(
            f"Adaptive at simulated acceptance: {model.title}",
            ("requests", "acceptance", "best fixed", "adaptive of the best", "runs",
             "adaptive of plain", "runs"),
            judged,
            (*how, "medians of ratios per batch with quartiles; runs: lowest to highest median of "
             "a single run; best fixed: no draft tokens (k=0) is one of the choices"),
        ),
        wanted_table("Wanted at simulated acceptance", wanted),
        Table(
            f"Draft lengths at simulated acceptance: {model.title}",
            ("requests", "acceptance", "draft tokens", "tok/jump", "tok/s", "speedup", "lost"),
            rows,
            (*how, HOW, "lost: steps in which the text had left the known continuation"),
        ),
    ]  # fmt: skip
    result = {
        "model": model.key,
        "simulated_acceptance": True,
        "plan": asdict(plan),
        "runs": list(runs),
        "wanted": [asdict(line) for line in wanted],
    }
    return Outcome(result, tables, charts)


Found = Sequence[Mapping[str, Figures]]  # one load and level, run by run


def _ratios(figures: Mapping[str, Figures], base: str, name: str) -> list[float]:
    """How many times as fast as `base`, batch by batch."""
    return ratios(_rates(figures[name]), _rates(figures[base]))


def _rates(figures: Figures) -> list[float]:
    return ratios(figures["tokens"], figures["decode_seconds"])


def _pooled(found: Found, base: str, name: str) -> Summary:
    return Summary.of([ratio for run in found for ratio in _ratios(run, base, name)])


def _best(found: Found) -> str:
    fixed = (name for name in found[0] if name != _ADAPTIVE)
    return max(fixed, key=lambda name: _pooled(found, _PLAIN, name).median)


def _judged(found: Found) -> tuple[str, ...]:
    best = _best(found)
    return (
        best,
        spread(_pooled(found, best, _ADAPTIVE), 3),
        _range(found, best),
        spread(_pooled(found, _PLAIN, _ADAPTIVE), 3),
        _range(found, _PLAIN),
    )


def _wanted(load: str, level: str, found: Found) -> list[Wanted]:
    best, where = _best(found), f"{load} at once, simulated acceptance {level}"
    least = _OF_PLAIN.get((int(load), level), _NO_LOSS)
    return [
        Wanted(f"{where}: of plain decoding", least, _pooled(found, _PLAIN, _ADAPTIVE).median),
        Wanted(f"{where}: of {best}", _OF_BEST, _pooled(found, best, _ADAPTIVE).median),
    ]


def _range(found: Found, base: str) -> str:
    single = [median(_ratios(run, base, _ADAPTIVE)) for run in found]
    return f"{min(single):.3f}\N{EN DASH}{max(single):.3f}"


def _cells(found: Found, name: str, of_plain: Summary) -> tuple[str, ...]:
    figures = [run[name] for run in found]
    tokens, steps = (sum(sum(item[what]) for item in figures) for what in ("tokens", "steps"))
    return (
        f"{tokens / steps:.2f}",
        f"{median(rate for item in figures for rate in _rates(item)):.1f}",
        spread(of_plain) if name != _PLAIN else "",
        str(sum(item["lost"] for item in figures)),
    )


def _chart(load: str, places: Sequence[str], charted: Mapping[str, Sequence[Summary]]) -> Chart:
    series = [
        Series(name, [s.median for s in sums], [s.low for s in sums], [s.high for s in sums])
        for name, sums in charted.items()
        if name != _PLAIN
    ]
    return Chart(
        f"{load} at once", "lines", "simulated acceptance", "times plain decoding", places, series,
        level=1.0,
    )  # fmt: skip
