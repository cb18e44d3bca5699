"""Adaptive against fixed draft lengths at set levels of acceptance, at a size that people use.

Weights of 1.1 B parameters that say something are not at hand, so their acceptance is simulated
(`simulated_drafter`); what passes cost is real. Every table says so. With one request and with
several at once; prompts come from the prefix cache, so that what is timed is decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median

from bench.models import BenchModel, Progress
from bench.prompts import Prompt
from bench.speculation.batches import HOW, Batch, in_batches, run_batch
from bench.speculation.simulated_drafter import SimulatedDrafter
from bench.speculation.ways import PLAIN, Config, Runner
from bench.tools.quiet import settle
from bench.tools.report import Chart, Outcome, Table, Wanted, series, spread, wanted_table
from bench.tools.stats import Summary, ratios, rotated

_OF_BEST, _NO_LOSS = 0.95, 0.97
# Of plain decoding, by requests at once and simulated acceptance; elsewhere nothing may be lost.
_OF_PLAIN = {(4, 0.9): 1.35, (8, 0.9): 1.2, (4, 0.7): 1.15}
_PLAIN, _ADAPTIVE = "k=0", "adaptive"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    each: int  # prompts, at least as many as requests at once
    new_tokens: int
    rounds: Mapping[int, int]  # on all prompts, by requests at once
    levels: tuple[float, ...] = (0.9, 0.7, 0.5, 0.3, 0.0)  # of simulated acceptance
    lengths: tuple[int, ...] = (1, 2, 4, 8)  # of drafts, for one request
    shared_lengths: tuple[int, ...] = (1, 3)  # for several at once

    @property
    def longest(self) -> int:
        """Most draft tokens of a request and step."""
        return max(*self.lengths, *self.shared_lengths)

    def ways(self, drafter: str, load: int) -> dict[str, Config]:
        """Plain decoding, each fixed length and adaptive, by name."""
        lengths = self.lengths if load == 1 else self.shared_lengths
        fixed = {f"k={k}": Config(drafter, k) for k in lengths}
        return {_PLAIN: PLAIN, **fixed, _ADAPTIVE: Config(drafter, self.longest, adaptive=True)}


FULL = Plan(8, 64, rounds={1: 2, 4: 8, 8: 12})
QUICK = Plan(2, 16, rounds={1: 1, 2: 1}, levels=(0.9, 0.0), lengths=(1, 3))


@dataclass(slots=True)
class Figures:
    """The batches of one way, and how often the drafter was lost."""

    batches: list[Batch] = field(default_factory=list)
    lost: int = 0

    @property
    def rates(self) -> list[float]:
        """Tokens per second, batch by batch."""
        return [batch.rate for batch in self.batches]

    def over(self, base: Figures) -> Summary:
        """How many times as fast as another way, batch by batch."""
        return Summary.of(ratios(self.rates, base.rates))


Level = dict[str, Figures]  # by way
Found = dict[tuple[int, float], Level]  # by requests at once and acceptance


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan, progress: Progress) -> Outcome:
    """Measure all levels of acceptance under every load."""
    longest = max(model.settings.max_k_draft, plan.longest)
    own = {"slots": max(plan.rounds), "prefix_cache": "all", "max_k_draft": longest}
    settings = replace(model.settings, **own)
    runner = Runner.load(replace(model, settings=settings))
    chosen = prompts[: plan.each]
    known = [(prompt, runner.run(prompt, PLAIN, plan.new_tokens).tokens) for prompt in chosen]
    found: Found = {}
    for load in plan.rounds:
        for acceptance in plan.levels:
            found[load, acceptance] = _measure(runner, known, acceptance, load, plan)
            progress(f"{load} at once, simulated acceptance {acceptance:g}")
    return outcome(model, found, plan)


def _measure(
    runner: Runner, known: Sequence[tuple[Prompt, tuple[int, ...]]], acceptance: float, load: int,
    plan: Plan,
) -> Level:  # fmt: skip
    engine = runner.engine
    drafter = SimulatedDrafter(acceptance, vocab_size=engine.info.vocab_size)
    for prompt, tokens in known:
        drafter.know(engine.encode(prompt.text), tokens)
    engine.scheduler.drafters[drafter.name] = drafter
    anew = Runner(engine, plan.longest)  # its controllers know nothing of other levels
    ways = plan.ways(drafter.name, load)
    batches = in_batches([prompt for prompt, _ in known], load)
    level = {name: Figures() for name in ways}
    settle()
    for turn in range(-1, plan.rounds[load]):  # the first is not counted: pages fault in
        for number, batch in enumerate(batches if turn >= 0 else batches[:1]):
            for name in rotated(list(ways), turn + number):
                lost = drafter.lost
                done = run_batch(anew, ways[name], batch, plan.new_tokens)
                if turn >= 0:
                    level[name].batches.append(done)
                    level[name].lost += drafter.lost - lost
    return level


def outcome(model: BenchModel, found: Found, plan: Plan) -> Outcome:
    """Tables and charts."""
    rows, judged, wanted = [], [], []
    for (load, acceptance), level in found.items():
        for name, figures in level.items():
            rows.append((str(load), f"{acceptance:g}", name, *_cells(figures, level[_PLAIN])))
        best = max(
            (name for name in level if name != _ADAPTIVE),
            key=lambda name: level[name].over(level[_PLAIN]).median,
        )
        of_best, of_plain = (level[_ADAPTIVE].over(level[base]) for base in (best, _PLAIN))
        judged.append((str(load), f"{acceptance:g}", best, spread(of_best, 3), spread(of_plain, 3)))
        where = f"{load} at once, simulated acceptance {acceptance:g}"
        least = _OF_PLAIN.get((load, acceptance), _NO_LOSS)
        wanted.append(Wanted(f"{where}: of plain decoding", least, of_plain.median))
        wanted.append(Wanted(f"{where}: of {best}", _OF_BEST, of_best.median))
    how = (
        f"{plan.each} prompts, {plan.new_tokens} new tokens each, greedy, in batches of as many as "
        "are asked at once, lengths in turns for every batch; draft tokens cost nothing to make, "
        "prompts come from the prefix cache",
        "simulated acceptance: the drafter knows the target's own continuation and errs with the "
        "probability that the level leaves; what passes cost is real",
    )
    tables = [
        Table(
            f"Adaptive at simulated acceptance: {model.title}",
            ("requests", "acceptance", "best fixed", "adaptive of the best", "adaptive of plain"),
            judged,
            (*how, "medians of ratios per batch with quartiles; best fixed: no draft tokens (k=0) "
             "is one of the choices"),
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
        "levels": [
            {"requests": load, "acceptance": acceptance}
            | {"ways": {name: asdict(figures) for name, figures in level.items()}}
            for (load, acceptance), level in found.items()
        ],
        "wanted": [asdict(line) for line in wanted],
    }
    charts = [_chart(load, found) for load in dict.fromkeys(load for load, _ in found)]
    return Outcome(result, tables, charts)


def _cells(figures: Figures, plain: Figures) -> tuple[str, ...]:
    tokens = sum(batch.tokens for batch in figures.batches)
    return (
        f"{tokens / sum(batch.steps for batch in figures.batches):.2f}",
        f"{median(figures.rates):.1f}",
        spread(figures.over(plain)) if figures is not plain else "",
        str(figures.lost),
    )


def _chart(load: int, found: Found) -> Chart:
    levels = {
        acceptance: level for (at_once, acceptance), level in found.items() if at_once == load
    }
    names = [name for name in next(iter(levels.values())) if name != _PLAIN]
    return Chart(
        f"{load} at once", "lines", "simulated acceptance", "times plain decoding",
        [f"{acceptance:g}" for acceptance in levels],
        [series(name, [lv[name].over(lv[_PLAIN]) for lv in levels.values()]) for name in names],
        level=1.0,
    )  # fmt: skip
