"""What speculation gains on ordinary chat: 200 questions in eight kinds and five languages.

The questions are this project's own (`bench/chat_prompts.json`). Every third question, from the
first on, is for choosing thresholds; the others are held out. By default only those are measured.
Answers end where the model ends them. No run reuses an earlier run's answers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.models import BenchModel
from bench.prompts import Prompt
from bench.speculation import ways
from bench.speculation.ways import PLAIN, Measured, Row, Runner, Sizes
from bench.tools.report import Outcome, Table, Target, yes
from specops.config import ConfigError

PROMPTS = Path(__file__).resolve().parents[1] / "chat_prompts.json"
AT_ONCE = 4
_CHOOSING = 3  # one of so many questions is for choosing thresholds
_MEDIAN, _SUM, _ANYWHERE, _SUM_AT_ONCE = 1.35, 1.4, 0.97, 1.15  # of plain decoding's speed


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: at most `each` questions of every kind."""

    each: int
    sizes: Sizes


FULL = Plan(25, Sizes(new_tokens=200))
QUICK = Plan(4, Sizes(new_tokens=48))


def questions(*, choosing: bool) -> list[tuple[str, str]]:
    """Kind and text of the held-out questions, or of those for choosing thresholds."""
    table = json.loads(PROMPTS.read_text("utf-8"))
    found = [
        (kind, text)
        for kind, languages in table.items()
        for texts in languages.values()
        for text in texts
    ]
    return [item for place, item in enumerate(found) if (place % _CHOOSING == 0) is choosing]


def run(model: BenchModel, plan: Plan, *, choosing: bool = False) -> Outcome:
    """Ask one by one and `AT_ONCE` at a time, plainly and adaptively in turns.

    Raises:
        ConfigError: the model has no chat template.
    """
    runner = Runner.load(model, chat=True)
    if not runner.engine.info.chat:
        raise ConfigError(f"{model.title} has no chat template: SPECOPS_MODEL=smollm2 has one")
    asked = questions(choosing=choosing)
    prompts = [
        Prompt(kind, text)
        for kind in dict.fromkeys(kind for kind, _ in asked)
        for text in [text for other, text in asked if other == kind][: plan.each]
    ]
    alone = ways.measure(runner, [runner.own], prompts, plan.sizes)
    sizes = replace(plan.sizes, at_once=AT_ONCE)
    together = ways.measure(runner, [runner.own], prompts, sizes)
    which = "for choosing" if choosing else "held out"
    return outcome(model, alone, together, plan.sizes, which)


def outcome(
    model: BenchModel, alone: Measured, together: Measured, sizes: Sizes, which: str
) -> Outcome:
    """A row per kind, one over all, and one for several clients at once."""
    (own,) = [config for config in alone.runs if config != PLAIN]
    kinds = {kind: alone.of(kind).row(own) for kind in alone.categories}
    rows = kinds | {"all": alone.row(own), f"all, {AT_ONCE} clients": together.row(own)}
    *_, whole, at_once = rows.values()
    sound = all(row.equal == row.greedy for row in rows.values())
    table = Table(
        f"Chat: {model.title}, {own.label}",
        ("kind", *ways.COLUMNS),
        [(kind, *row.cells) for kind, row in rows.items()],
        (
            f"{len(alone.batches)} questions ({which}) of {PROMPTS.name} in five languages, up to "
            f"{sizes.new_tokens} tokens, greedy, one client but for the last row",
            *ways.HOW,
            f"every output that of plain decoding: {yes(sound)}",
        ),
    )
    sums = {kind: row.total_speedup for kind, row in kinds.items()}
    targets = [
        Target("one client: median speed over plain", _MEDIAN, whole.speedup.median),
        Target("one client: sum over plain", _SUM, whole.total_speedup),
        *(Target(f"{kind}: sum over plain", _ANYWHERE, total) for kind, total in sums.items()),
        Target(f"{AT_ONCE} clients: sum over plain", _SUM_AT_ONCE, at_once.total_speedup),
    ]
    result = {"model": model.key, "questions": which, **asdict(sizes), "lossless": sound}
    result |= {"kinds": {kind: asdict(row) for kind, row in rows.items()}}
    return Outcome(result, [table, sources_table(whole)], targets=targets, sound=sound)


def sources_table(row: Row) -> Table:
    """A row per source: its draft tokens, and the share accepted at each position."""
    longest = max((len(one.verified_per_position) for one in row.sources.values()), default=0)
    lines = []
    for name, source in row.sources.items():
        pairs = list(zip(source.verified_per_position, source.accepted_per_position, strict=True))
        shares = [f"{accepted / verified:.0%}" for verified, accepted in pairs]
        shares += [""] * (longest - len(pairs))
        lines.append((name, str(sum(source.verified_per_position)), *shares))
    return Table(
        f"Accepted by source and position: {row.label}",
        ("source", "draft tokens", *map(str, range(1, longest + 1))),
        lines,
        ("of the draft tokens that were verified at the position",),
    )
