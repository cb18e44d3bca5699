"""Several requests at once: what adaptive speculation gains, and whether it ever loses.

All requests of a batch share every pass, draft tokens of all of them included, so verifying costs
little as long as a pass is short; whether a draft token pays turns with the load and with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from bench.models import BenchModel, Progress
from bench.prompts import CODE, Prompt
from bench.speculation.batches import HOW, Batch, in_batches, run_batch
from bench.speculation.ways import FIXED, PLAIN, Config, Runner, Sizes
from bench.tools.quiet import settle
from bench.tools.report import Chart, Outcome, Table, Wanted, series, spread, wanted_table
from bench.tools.stats import Summary, ratios, rotated

_OF_PLAIN = {(CODE, 1): 1.5, (CODE, 4): 1.5, (CODE, 8): 1.3}
_NO_LOSS = 0.97  # of plain decoding on any other text or load; of the better fixed way everywhere


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: every load of `loads` requests at once, on all prompts in batches."""

    each: int
    sizes: Sizes
    loads: tuple[int, ...] = (1, 4, 8)


FULL = Plan(16, Sizes(new_tokens=128, rounds=6))
QUICK = Plan(2, Sizes(new_tokens=16), loads=(2,))

Batches = dict[Config, list[Batch]]
Found = dict[tuple[str, int], Batches]  # by category and requests at once


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan, progress: Progress) -> Outcome:
    """Measure plain decoding, fixed and adaptive speculation under every load."""
    slots = max(model.settings.slots, *plan.loads)
    runner = Runner.load(replace(model, settings=replace(model.settings, slots=slots)))
    ways = [PLAIN, *runner.ways(FIXED)]
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    found: Found = {}
    settle()
    for load in plan.loads:
        for text in categories:
            texts = [prompt for prompt in prompts if prompt.category == text]
            found[text, load] = _measure(runner, ways, in_batches(texts, load), plan.sizes)
            progress(f"{load} at once, {text}")
    return outcome(model, found, plan, runner.engine.info.default_drafter)


def _measure(
    runner: Runner, ways: Sequence[Config], batches: Sequence[Sequence[Prompt]], sizes: Sizes
) -> Batches:
    for config in ways:
        run_batch(runner, config, batches[0], sizes.new_tokens)
    found: Batches = {config: [] for config in ways}
    for turn in range(sizes.rounds):
        for number, batch in enumerate(batches):
            for config in rotated(ways, turn + number):
                found[config].append(run_batch(runner, config, batch, sizes.new_tokens))
    return found


def outcome(model: BenchModel, found: Found, plan: Plan, own: str) -> Outcome:
    """The tables and a chart of the default drafter."""
    wanted, lines, result = [], [], []
    for (text, load), batches in found.items():
        for config, measured in batches.items():
            # What adaptive speculation chooses between: no draft tokens, and the fixed length.
            fixed = [way for way in batches if not way.adaptive]
            fixed = [way for way in fixed if way.drafter in (PLAIN.drafter, config.drafter)]
            better = max(fixed, key=lambda way: _rate(batches[way]))
            of_plain = _speedup(batches[PLAIN], measured)
            of_better = _speedup(batches[better], measured)
            whole = Summary.of(
                ratios([b.seconds for b in batches[PLAIN]], [b.seconds for b in measured])
            )
            jump = sum(b.tokens for b in measured) / sum(b.steps for b in measured)
            rate = Summary.of([b.rate for b in measured])
            lines.append(
                (
                    text, str(load), config.label, f"{rate.median:.0f}", f"{jump:.2f}",
                    spread(of_plain) if config.k else "",
                    spread(whole) if config.k else "",
                    spread(of_better) if config.adaptive else "",
                    better.label if config.adaptive else "",
                )
            )  # fmt: skip
            result.append(
                {"category": text, "requests": load, **asdict(config), "tokens_per_jump": jump}
                | {"tokens_per_second": asdict(rate), "speedup": asdict(of_plain)}
                | {"whole": asdict(whole), "better": better.label, "of_better": asdict(of_better)}
            )
            if config.adaptive and config.drafter == own:
                where, least = f"{text}, {load} at once", _OF_PLAIN.get((text, load), _NO_LOSS)
                wanted.append(Wanted(f"{where}: of plain decoding", least, of_plain.median))
                if better != PLAIN:
                    wanted.append(Wanted(f"{where}: of {better.label}", _NO_LOSS, of_better.median))
    table = Table(
        f"Requests at once: {model.title}",
        ("text", "requests", "drafter", "tok/s", "tok/jump", "speedup", "whole", "of the better",
         "better"),
        lines,
        (
            f"{plan.each} prompts of each kind of text in batches, {plan.sizes.new_tokens} new "
            f"tokens each, {plan.sizes.rounds} rounds, all of a batch sent at once, ways in turns",
            f"{HOW}; medians with quartiles over batches and rounds; of the better: over plain "
            "decoding or the fixed length, whichever was faster over all batches",
        ),
    )  # fmt: skip
    judged = wanted_table(f"Wanted of {own}, adaptive, the default", wanted)
    record = {"model": model.key, **asdict(plan.sizes), "loads": result}
    record["wanted"] = [asdict(line) for line in wanted]
    return Outcome(record, [table, judged], _charts(found, own))


def _rate(batches: Sequence[Batch]) -> float:
    """Tokens per second over all batches."""
    return sum(b.tokens for b in batches) / sum(b.decode_seconds for b in batches)


def _speedup(bases: Sequence[Batch], batches: Sequence[Batch]) -> Summary:
    """How many times as fast as the bases, batch by batch."""
    return Summary.of(ratios([b.rate for b in batches], [b.rate for b in bases]))


def _charts(found: Found, own: str) -> list[Chart]:
    loads = list(dict.fromkeys(load for _, load in found))
    return [
        Chart(
            f"{text}: speed over plain decoding", "lines", "requests at once",
            "times plain decoding", [str(load) for load in loads],
            [
                series(
                    way.label,
                    [_speedup(found[text, load][PLAIN], found[text, load][way]) for load in loads],
                )
                for way in found[text, loads[0]]
                if way.drafter == own
            ],
            level=1.0,
        )
        for text in dict.fromkeys(text for text, _ in found)
    ]  # fmt: skip
