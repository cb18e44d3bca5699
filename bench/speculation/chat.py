"""What speculation gains on ordinary chat: 200 questions in eight kinds and five languages.

The questions are this project's own (`bench/chat_prompts.json`). Every third question, from the
first on, is for choosing thresholds; the others are held out. By default only those are measured,
greedily and at temperature 0.7 with a seed each, by one, four and eight clients. Answers end where
the model ends them. No run reuses an earlier run's answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.models import BenchModel
from bench.prompts import Prompt
from bench.speculation import ways
from bench.speculation.ways import PLAIN, Measured, Promises, Row, Runner, Sizes
from bench.tools.report import Outcome, Table, Target, yes
from specops.config import ConfigError
from specops.request import SamplingParams

PROMPTS = Path(__file__).resolve().parents[1] / "chat_prompts.json"
AT_ONCE = (4, 8)
GREEDY, TEMPERATURE = "greedy", 0.7
SAMPLED = f"temperature {TEMPERATURE}"
_CHOOSING = 3  # one of so many questions is for choosing thresholds
_ANYWHERE = 1.0  # of plain decoding's speed
_MEDIAN, _SUM = {GREEDY: 2.2, SAMPLED: 1.5}, {GREEDY: 2.2, SAMPLED: 1.5}
_SUM_AT_ONCE = {GREEDY: {4: 1.35, 8: _ANYWHERE}, SAMPLED: {4: _ANYWHERE, 8: _ANYWHERE}}
_OFF = 0.04  # most by which a promise may be off, where it was made `_OFTEN` times
_OFTEN = 500

Found = Mapping[str, Mapping[int, Measured]]
"""Results by how tokens are drawn and by the number of clients."""


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
    """Ask one by one and several at a time, plainly and adaptively in turns.

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
    drawn = [
        replace(prompt, sampling=SamplingParams(TEMPERATURE, seed=seed))
        for seed, prompt in enumerate(prompts)
    ]
    found = {
        name: {
            clients: ways.measure(runner, [runner.own], some, replace(plan.sizes, at_once=clients))
            for clients in (1, *AT_ONCE)
        }
        for name, some in ((GREEDY, prompts), (SAMPLED, drawn))
    }
    return outcome(model, found, plan.sizes, "for choosing" if choosing else "held out")


def outcome(model: BenchModel, found: Found, sizes: Sizes, which: str) -> Outcome:
    """For each way to draw tokens a row per kind, one over all, and one per number of clients."""
    first = next(iter(found.values()))[1]
    (own,) = [config for config in first.runs if config != PLAIN]
    rows = {name: _rows(by_clients, own) for name, by_clients in found.items()}
    sound = all(row.equal == row.repeatable for part in rows.values() for row in part.values())
    notes = (
        f"{len(first.batches)} questions ({which}) of {PROMPTS.name} in five languages, up to "
        f"{sizes.new_tokens} tokens, one client but for the last rows",
        *ways.HOW,
        f"every output that of plain decoding: {yes(sound)}",
    )
    tables = [
        Table(
            f"Chat, {name}: {model.title}, {own.label}",
            ("kind", *ways.COLUMNS),
            [(kind, *row.cells) for kind, row in part.items()],
            notes if name == GREEDY else (),
        )
        for name, part in rows.items()
    ]
    tables += [sources_table(name, part["all"]) for name, part in rows.items()]
    every = [measured for by_clients in found.values() for measured in by_clients.values()]
    promises = sum((measured.promises(own) for measured in every), Promises())
    targets = [
        line for name, by_clients in found.items() for line in _judged(name, by_clients, own)
    ]
    off = promises.most_off(_OFTEN)
    targets.append(Target("promised and kept acceptance, apart", _OFF, off, at_most=True))
    result = {"model": model.key, "questions": which, **asdict(sizes), "lossless": sound}
    result |= {
        "drawn": {
            name: {kind: asdict(row) for kind, row in part.items()} for name, part in rows.items()
        },
        "promises": promises.record(),
    }
    return Outcome(result, [*tables, promises_table(promises)], targets=targets, sound=sound)


def _rows(by_clients: Mapping[int, Measured], own: ways.Config) -> dict[str, Row]:
    alone = by_clients[1]
    rows = {kind: alone.of(kind).row(own) for kind in alone.categories} | {"all": alone.row(own)}
    several = {clients: found for clients, found in by_clients.items() if clients > 1}
    return rows | {f"all, {count} clients": found.row(own) for count, found in several.items()}


def _judged(name: str, by_clients: Mapping[int, Measured], own: ways.Config) -> list[Target]:
    alone = by_clients[1]
    whole, kinds = alone.row(own), {kind: alone.of(kind).row(own) for kind in alone.categories}
    return [
        Target(f"{name}: median speed over plain", _MEDIAN[name], whole.speedup.median),
        Target(f"{name}: sum over plain", _SUM[name], whole.total_speedup),
        *(
            Target(f"{name}, {kind}: sum over plain", _ANYWHERE, row.total_speedup)
            for kind, row in kinds.items()
        ),
        *(
            Target(f"{name}, {count} clients: sum over plain", line, found.row(own).total_speedup)
            for count, line in _SUM_AT_ONCE[name].items()
            if (found := by_clients.get(count)) is not None
        ),
    ]


def sources_table(name: str, row: Row) -> Table:
    """A row per source: its draft tokens, and the share accepted at each position."""
    longest = max((len(one.verified_per_position) for one in row.sources.values()), default=0)
    lines = []
    for source_name, source in row.sources.items():
        pairs = list(zip(source.verified_per_position, source.accepted_per_position, strict=True))
        shares = [f"{accepted / verified:.0%}" for verified, accepted in pairs]
        shares += [""] * (longest - len(pairs))
        lines.append((source_name, str(sum(source.verified_per_position)), *shares))
    return Table(
        f"Accepted by source and position, {name}: {row.label}",
        ("source", "draft tokens", *map(str, range(1, longest + 1))),
        lines,
        ("of the draft tokens that were verified at the position",),
    )


def promises_table(promises: Promises) -> Table:
    """A row per source and tenth of the promised probability."""
    lines: Sequence[tuple[str, ...]] = [
        (source, f"{tenth / 10:.1f}", str(made), f"{promised / made:.3f}", f"{kept / made:.3f}")
        for (source, tenth), (made, promised, kept) in sorted(promises.counts.items())
    ]
    return Table(
        "Promised and kept acceptance",
        ("source", "from", "draft tokens", "promised", "kept"),
        lines,
        (
            "by tenth of the promised probability, over all of these runs; of the draft tokens "
            "that were verified and whose predecessors were all accepted",
        ),
    )
