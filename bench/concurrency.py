"""Several requests at once: is adaptive speculation as fast as the better of on and off?

With more rows a shared plain pass gets cheaper per token, while verification stays a pass per
request; whether guessing pays turns with the load.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from bench import speculation
from bench.models import BenchModel, Progress
from bench.outcome import Outcome
from bench.prompts import Prompt
from bench.quiet import settle
from bench.report import Chart, Series, Table, Wanted, spread, wanted_table
from bench.speculation import PLAIN, Config, Runner
from bench.stats import Summary, ratios, rotated
from specops.request import StepKind

_WANTED = 0.97


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: every load of `loads` requests at once, on all prompts in batches."""

    each: int
    sizes: speculation.Plan
    loads: tuple[int, ...] = (1, 4, 8)


FULL = Plan(16, speculation.Plan(new_tokens=128, rounds=6))
QUICK = Plan(2, speculation.Plan(new_tokens=16), loads=(2,))


@dataclass(frozen=True, slots=True)
class Batch:
    """Some requests at once. `seconds`: from the first step to the last, prompts' passes apart."""

    seconds: float
    tokens: int
    steps: int

    @property
    def rate(self) -> float:
        """Decoded tokens per second, all requests together."""
        return self.tokens / self.seconds


Key = tuple[str, int]  # category, requests at once


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan, progress: Progress) -> Outcome:
    """Measure plain decoding, fixed and adaptive speculation under every load."""
    rows = max(model.settings.rows, *plan.loads)
    runner = Runner.load(replace(model, settings=replace(model.settings, rows=rows)))
    ways = [PLAIN, *runner.ways(model.settings.k_draft)]
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    found: dict[Key, dict[Config, list[Batch]]] = {}
    settle()
    for load in plan.loads:
        for text in categories:
            texts = [prompt for prompt in prompts if prompt.category == text]
            found[text, load] = _measure(runner, ways, texts, load, plan.sizes)
            progress(f"{load} at once, {text}")
    own = runner.engine.info.default_drafter
    return outcome(model, found, plan, own)


def _measure(
    runner: Runner,
    ways: Sequence[Config],
    prompts: Sequence[Prompt],
    load: int,
    sizes: speculation.Plan,
) -> dict[Config, list[Batch]]:
    batches = [list(prompts[start : start + load]) for start in range(0, len(prompts), load)]
    batches = [batch for batch in batches if len(batch) == load]
    for config in ways:
        _batch(runner, config, batches[0], sizes.new_tokens)
    found: dict[Config, list[Batch]] = {config: [] for config in ways}
    for turn in range(sizes.rounds):
        for number, batch in enumerate(batches):
            for config in rotated(ways, turn + number):
                found[config].append(_batch(runner, config, batch, sizes.new_tokens))
    return found


def _batch(runner: Runner, config: Config, prompts: Sequence[Prompt], new_tokens: int) -> Batch:
    runner.choose(config)
    scheduler = runner.engine.scheduler
    for number, prompt in enumerate(prompts):
        request = runner.request(prompt, config, new_tokens)
        scheduler.add(replace(request, request_id=f"bench-{number}"))
    prefilling, steps, start = 0.0, 0, time.perf_counter()
    while scheduler.busy:
        for step in scheduler.step().stats:
            prefilling += step.seconds if step.kind is StepKind.PREFILL else 0.0
            steps += step.rows if step.kind is not StepKind.PREFILL else 0
    seconds = time.perf_counter() - start - prefilling
    return Batch(seconds, len(prompts) * (new_tokens - 1), steps)


def outcome(
    model: BenchModel, found: dict[Key, dict[Config, list[Batch]]], plan: Plan, own: str
) -> Outcome:
    """The tables and a chart of the default drafter."""
    wanted, lines, result = [], [], []
    for (text, load), batches in found.items():
        plain = batches[PLAIN]
        for config, measured in batches.items():
            # Plain decoding takes part in the choice between on and off.
            fixed = next(c for c in batches if c.drafter == config.drafter and not c.adaptive)
            better = min((PLAIN, fixed), key=lambda c: sum(b.seconds for b in batches[c]))
            of_plain = Summary.of(_speedups(plain, measured))
            of_better = Summary.of(_speedups(batches[better], measured))
            jump = sum(b.tokens for b in measured) / sum(b.steps for b in measured)
            rate = Summary.of([b.rate for b in measured])
            lines.append(
                (
                    text, str(load), config.label, f"{rate.median:.0f}", f"{jump:.2f}",
                    spread(of_plain) if config.k else "",
                    spread(of_better) if config.adaptive else "",
                    better.label if config.adaptive else "",
                )
            )  # fmt: skip
            result.append(
                {
                    "category": text,
                    "requests": load,
                    **asdict(config),
                    "tokens_per_second": asdict(rate),
                    "tokens_per_jump": jump,
                    "speedup": asdict(of_plain),
                    "better": better.label,
                    "of_better": asdict(of_better),
                }
            )
            if config.adaptive and config.drafter == own:
                what = f"{text}, {load} at once: against {better.label}"
                wanted.append(Wanted(what, _WANTED, of_better.median))
    table = Table(
        f"Requests at once: {model.title}",
        ("text", "requests", "guesses", "tok/s", "tok/jump", "speedup", "of the better", "better"),
        lines,
        (
            f"{plan.each} prompts of each kind of text in batches, {plan.sizes.new_tokens} new "
            f"tokens each, {plan.sizes.rounds} rounds, all of a batch sent at once, ways in turns",
            "tok/s: decoded tokens of all requests over the time of the batch, the target's passes "
            "over prompts apart; speedup: over plain decoding, per batch, median with quartiles; "
            "of the better: over plain decoding or the fixed length, whichever took less in all",
        ),
    )
    judged = wanted_table(f"Wanted of {own}, adaptive, the default", wanted)
    record = {
        "model": model.key,
        "new_tokens": plan.sizes.new_tokens,
        "rounds": plan.sizes.rounds,
        "loads": result,
        "wanted": [asdict(line) for line in wanted],
    }
    return Outcome(record, [table, judged], _charts(found, own))


def _speedups(bases: Sequence[Batch], batches: Sequence[Batch]) -> list[float]:
    return ratios([b.seconds for b in bases], [b.seconds for b in batches])


def _charts(found: dict[Key, dict[Config, list[Batch]]], own: str) -> list[Chart]:
    charts = []
    loads = list(dict.fromkeys(load for _, load in found))
    for text in dict.fromkeys(text for text, _ in found):
        series = []
        for config in found[text, loads[0]]:
            if config.drafter != own:
                continue
            sums = [
                Summary.of(_speedups(found[text, load][PLAIN], found[text, load][config]))
                for load in loads
            ]
            series.append(
                Series(
                    config.label,
                    [item.median for item in sums],
                    [item.low for item in sums],
                    [item.high for item in sums],
                )
            )
        charts.append(
            Chart(f"{text}: speed over plain decoding", "lines", "requests at once",
                  "times plain decoding", [str(load) for load in loads], series, level=1.0)
        )  # fmt: skip
    return charts
