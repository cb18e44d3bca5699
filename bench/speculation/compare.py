"""Which drafter for which text: plain, suffixes, draft, cascade and adaptive, per category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.models import BenchModel, Progress
from bench.prompts import CODE, Prompt
from bench.speculation import ways
from bench.speculation.ways import FIXED, PLAIN, Config, Measured, Row, Runner, Sizes
from bench.tools.report import Chart, Outcome, Table, Wanted, series, wanted_table, yes

# Of adaptive speculation with the service's own drafter.
_WANTED_ON_CODE, _WANTED_JUMP, _WANTED_ANYWHERE = 1.5, 2.2, 0.97


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `each` prompts per category."""

    each: int
    sizes: Sizes


FULL = Plan(20, Sizes(new_tokens=128, rounds=3))
QUICK = Plan(2, Sizes(new_tokens=16))


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan, progress: Progress) -> Outcome:
    """Measure all configurations on all prompts."""
    runner, settings = Runner.load(model), model.settings
    configs = [PLAIN, *sorted(runner.ways(FIXED), key=lambda way: way.adaptive)]
    measured = ways.measure(runner, configs, prompts, plan.sizes, progress)
    own = Config(runner.engine.info.default_drafter, settings.max_k_draft, adaptive=True)
    return outcome(model, measured, plan.sizes, own)


def outcome(model: BenchModel, measured: Measured, sizes: Sizes, own: Config) -> Outcome:
    """Tables and charts; every greedy answer must be plain decoding's.

    `own` is the configuration that the service would choose by itself.
    """
    categories = list(dict.fromkeys(prompt.category for prompt in measured.prompts))
    rows = {category: measured.of(category).rows() for category in categories}
    sound = all(row.equal == row.greedy for found in rows.values() for row in found)
    wanted = [line for category in categories for line in _wanted(category, rows[category], own)]
    each = {category: len(measured.of(category).prompts) // sizes.rounds for category in categories}
    table = Table(
        f"Drafters by kind of text: {model.title}",
        ("text", "drafter", *ways.COLUMNS),
        [(text, row.label, *row.cells) for text, found in rows.items() for row in found],
        (
            f"{', '.join(f'{count} {text}' for text, count in each.items())} prompts, "
            f"{sizes.new_tokens} new tokens each, {sizes.rounds} rounds, one stream",
            *ways.HOW,
            f"every greedy output that of plain decoding: {yes(sound)}",
        ),
    )
    labels = [row.label for row in rows[categories[0]] if row.k]
    shown = [
        series(label, [r.speedup for text in categories for r in rows[text] if r.label == label])
        for label in labels
    ]
    chart = Chart(
        f"Speed over plain decoding: {model.title}",
        "bars", "kind of text", "times plain decoding", categories, shown, level=1.0,
    )  # fmt: skip
    result = {
        "model": model.key,
        "prompts": each,
        **asdict(sizes),
        "lossless": sound,
        "categories": {text: [asdict(row) for row in found] for text, found in rows.items()},
        "wanted": [asdict(line) for line in wanted],
    }
    judged = wanted_table(f"Wanted of {own.label}, the default", wanted)
    return Outcome(result, [table, judged] if wanted else [table], [chart], sound)


def _wanted(category: str, rows: Sequence[Row], own: Config) -> list[Wanted]:
    (row,) = [row for row in rows if row.label == own.label] or [None]
    if row is None:
        return []
    speed, jump = row.speedup.median, row.tokens_per_jump
    if category != CODE:
        return [Wanted(f"{category}: speed over plain", _WANTED_ANYWHERE, speed)]
    return [
        Wanted("code: speed over plain", _WANTED_ON_CODE, speed),
        Wanted("code: tokens per jump", _WANTED_JUMP, jump),
    ]
