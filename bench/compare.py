"""Which drafter for which text: plain, n-gram, draft model, cascade and adaptive, per category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench import speculation
from bench.models import BenchModel, Progress
from bench.outcome import Outcome
from bench.prompts import CODE, Prompt
from bench.report import Chart, Table, Wanted, wanted_table
from bench.speculation import COLUMNS, HOW, PLAIN, Config, Measured, Row, Runner

# Of adaptive speculation with the service's own drafter.
_WANTED_ON_CODE, _WANTED_JUMP, _WANTED_ANYWHERE = 1.5, 2.2, 0.97


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `each` prompts per category."""

    each: int
    sizes: speculation.Plan


FULL = Plan(20, speculation.Plan(new_tokens=128, rounds=3))
QUICK = Plan(2, speculation.Plan(new_tokens=16))


def run(
    model: BenchModel, prompts: Sequence[Prompt], sizes: speculation.Plan, progress: Progress
) -> Outcome:
    """Measure all configurations on all prompts."""
    runner = Runner.load(model)
    settings = model.settings
    ways = [PLAIN, *sorted(runner.ways(settings.k_draft), key=lambda way: way.adaptive)]
    measured = speculation.measure(runner, ways, prompts, sizes, progress)
    own = Config(runner.engine.info.default_drafter, settings.max_k_draft, adaptive=True)
    return outcome(model, measured, sizes, own)


def outcome(model: BenchModel, measured: Measured, sizes: speculation.Plan, own: Config) -> Outcome:
    """Tables and charts of what was measured.

    `own` is the configuration that the service would choose by itself.
    """
    categories = list(dict.fromkeys(prompt.category for prompt in measured.prompts))
    rows = {category: measured.of(category).rows() for category in categories}
    wanted = [line for category in categories for line in _wanted(category, rows[category], own)]
    each = {category: len(measured.of(category).prompts) // sizes.rounds for category in categories}
    table = Table(
        f"Drafters by kind of text: {model.title}",
        ("text", "drafter", *COLUMNS),
        [(text, row.label, *row.cells) for text, found in rows.items() for row in found],
        (
            f"{', '.join(f'{count} {text}' for text, count in each.items())} prompts, "
            f"{sizes.new_tokens} new tokens each, {sizes.rounds} rounds, one stream",
            *HOW,
        ),
    )
    labels = [row.label for row in rows[categories[0]] if row.k]
    series = [
        speculation.speedups(
            label, [row for text in categories for row in rows[text] if row.label == label]
        )
        for label in labels
    ]
    chart = Chart(
        f"Speed over plain decoding: {model.title}",
        "bars", "kind of text", "times plain decoding", categories, series, level=1.0,
    )  # fmt: skip
    result = {
        "model": model.key,
        "prompts": each,
        "new_tokens": sizes.new_tokens,
        "rounds": sizes.rounds,
        "categories": {text: speculation.result(measured.of(text)) for text in categories},
        "wanted": [asdict(line) for line in wanted],
    }
    judged = wanted_table(f"Wanted of {own.label}, the default", wanted)
    return Outcome(result, [table, judged] if wanted else [table], [chart])


def _wanted(category: str, rows: Sequence[Row], own: Config) -> list[Wanted]:
    lines = []
    for row in rows:
        if row.label != own.label:
            continue
        if category == CODE:
            lines.append(Wanted("code: speed over plain", _WANTED_ON_CODE, row.speedup.median))
            lines.append(Wanted("code: tokens per jump", _WANTED_JUMP, row.tokens_per_jump))
        else:
            what = f"{category}: speed over plain"
            lines.append(Wanted(what, _WANTED_ANYWHERE, row.speedup.median))
    return lines
