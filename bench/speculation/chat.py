"""What speculation gains on ordinary chat: questions in eight kinds and five languages.

The questions are this project's own (`bench/chat_prompts.json`): some are for choosing thresholds,
the others are held out. By default only the latter are measured, greedily and at temperature 0.7
with a seed each, by one, four and eight clients. Answers end where the model ends them. No run
reuses an earlier run's answers.

Small models repeat themselves, mostly in languages that they do not speak, and what was said before
is easily guessed. So the first figure is that of English questions whose answers do not repeat, and
the others stand in rows of their own.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from bench.models import BenchModel
from bench.prompts import Prompt
from bench.speculation import ways
from bench.speculation.ways import PLAIN, Measured, Promises, Row, Runner, Sizes
from bench.tools.report import Outcome, Table, Target, yes
from specops.config import ConfigError
from specops.request import SamplingParams
from specops.runtime import kernels

PROMPTS = Path(__file__).resolve().parents[1] / "chat_prompts.json"
AT_ONCE = (4, 8)
GREEDY, TEMPERATURE = "greedy", 0.7
SAMPLED = f"temperature {TEMPERATURE}"
HELD_OUT, CHOOSING = "held out", "choosing"  # the parts of PROMPTS
ENGLISH = "en"
FRESH, REST = "English, without repetition", "the others"
_REPEATED, _WORDS = 0.1, 6  # an answer repeats itself if this share of groups of words came before
_ANYWHERE = 1.0  # of plain decoding's speed
_WHOLE = {GREEDY: 1.5, SAMPLED: 1.25}  # of plain decoding's, on FRESH by one client
_OFF = 0.04  # most by which a promise may be off, where it was made `_OFTEN` times
_OFTEN = 500

Found = Mapping[str, Mapping[str, Measured]]
"""Results by how tokens are drawn and by the row of the table."""


class Question(NamedTuple):
    """A question that a user could send."""

    kind: str
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: at most `each` questions of every kind and language."""

    each: int
    sizes: Sizes


FULL = Plan(25, Sizes(new_tokens=200))
QUICK = Plan(1, Sizes(new_tokens=48))


def questions(part: str = HELD_OUT, each: int | None = None) -> list[Question]:
    """The questions of a part of the file, at most `each` of every kind and language."""
    table = json.loads(PROMPTS.read_text("utf-8"))[part]
    return [
        Question(kind, language, text)
        for kind, languages in table.items()
        for language, texts in languages.items()
        for text in texts[:each]
    ]


def repeats(text: str) -> bool:
    """Whether a tenth or more of the text's groups of six words came before in it."""
    words = text.split()
    groups = [tuple(words[place : place + _WORDS]) for place in range(len(words) - _WORDS + 1)]
    return bool(groups) and 1 - len(set(groups)) / len(groups) >= _REPEATED


def run(model: BenchModel, plan: Plan, *, part: str = HELD_OUT) -> Outcome:
    """Ask one by one and several at a time, plainly and adaptively in turns.

    Raises:
        ConfigError: the model has no chat template.
    """
    runner = Runner.load(model, chat=True)
    if not runner.engine.info.chat:
        raise ConfigError(f"{model.title} has no chat template: SPECOPS_MODEL=smollm2 has one")
    asked = questions(part, plan.each)
    prompts = [Prompt(question.kind, question.text) for question in asked]
    drawn = [
        replace(prompt, sampling=SamplingParams(TEMPERATURE, seed=seed))
        for seed, prompt in enumerate(prompts)
    ]
    english = {question.text for question in asked if question.language == ENGLISH}
    found = {
        name: _measured(runner, some, plan.sizes, english)
        for name, some in ((GREEDY, prompts), (SAMPLED, drawn))
    }
    return outcome(model, found, plan.sizes, f"{len(asked)} questions ({part})")


def _measured(
    runner: Runner, prompts: Sequence[Prompt], sizes: Sizes, english: Collection[str]
) -> dict[str, Measured]:
    """By one client, then what repeats and what does not by several."""
    alone = ways.measure(runner, [runner.own], prompts, sizes)
    found = parted(alone, english)
    fresh = {batch[0].text for batch in found[FRESH].batches} if FRESH in found else set()
    for clients in AT_ONCE:
        for name, wanted in ((FRESH, True), (REST, False)):
            some = [prompt for prompt in prompts if (prompt.text in fresh) is wanted]
            if len(some) >= clients:
                together = replace(sizes, at_once=clients)
                row = f"{name}, {clients} clients"
                found[row] = ways.measure(runner, [runner.own], some, together)
    return found


def parted(alone: Measured, english: Collection[str]) -> dict[str, Measured]:
    """One client's results by language and repetition, then by kind of FRESH, then all.

    Args:
        alone: of batches of one prompt each.
        english: texts of the English prompts.
    """
    places: dict[str, list[int]] = {}
    kinds: dict[str, list[int]] = {}
    for place, (batch, plain) in enumerate(zip(alone.batches, alone.runs[PLAIN], strict=True)):
        language = "English" if batch[0].text in english else "other languages"
        again = "repeating" if repeats(plain.answers[0].text) else "without repetition"
        name = f"{language}, {again}"
        places.setdefault(name, []).append(place)
        if name == FRESH:
            kinds.setdefault(f"{FRESH}: {batch[0].category}", []).append(place)
    order = {name: places[name] for name in sorted(places, key=lambda name: (name != FRESH, name))}
    return {name: alone.at(kept) for name, kept in (order | kinds).items()} | {"all": alone}


def outcome(model: BenchModel, found: Found, sizes: Sizes, which: str) -> Outcome:
    """A table for each way to draw tokens, with a row for each part of its results."""
    every = [measured for parts in found.values() for measured in parts.values()]
    (own,) = [config for config in every[0].runs if config != PLAIN]
    rows = {
        name: {part: measured.row(own) for part, measured in parts.items()}
        for name, parts in found.items()
    }
    sound = all(row.equal == row.repeatable for part in rows.values() for row in part.values())
    notes = (
        f"{which} of {PROMPTS.name}, up to {sizes.new_tokens} tokens, {kernels.kernel()} kernels; "
        "one client where no number is named",
        f"repeating: a tenth or more of the answer's groups of {_WORDS} words came before in it",
        *ways.HOW,
        f"every output that of plain decoding: {yes(sound)}",
    )
    tables = [
        Table(
            f"Chat, {name}: {model.title}, {own.label}",
            ("questions", *ways.COLUMNS),
            [(part, *row.cells) for part, row in parts.items()],
            notes if name == GREEDY else (),
        )
        for name, parts in rows.items()
    ]
    tables += [sources_table(name, parts["all"]) for name, parts in rows.items()]
    # The rows before "all" are parts of it.
    once = [
        measured
        for parts in found.values()
        for part, measured in parts.items()
        if part == "all" or part.endswith("clients")
    ]
    promises = sum((measured.promises(own) for measured in once), Promises())
    targets = [line for name, parts in rows.items() for line in _judged(name, parts)]
    off = promises.most_off(_OFTEN)
    targets.append(Target("promised and kept acceptance, apart", _OFF, off, at_most=True))
    result = {"model": model.key, "questions": which, **asdict(sizes), "lossless": sound}
    result |= {
        "drawn": {
            name: {part: asdict(row) for part, row in parts.items()} for name, parts in rows.items()
        },
        "promises": promises.record(),
    }
    return Outcome(result, [*tables, promises_table(promises)], targets=targets, sound=sound)


def _judged(name: str, rows: Mapping[str, Row]) -> list[Target]:
    """Whole time over plain decoding's: a line for every row, a higher one for FRESH."""
    return [
        Target(
            f"{name}, {part}: whole time over plain",
            _WHOLE[name] if part == FRESH else _ANYWHERE,
            row.whole_speedup,
        )
        for part, row in rows.items()
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
