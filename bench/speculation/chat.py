"""Measures speculation's gain on ordinary chat: questions of eight kinds in five languages.

The questions are this project's own (`bench/chat_prompts.json`): some are for choosing thresholds,
the others are held out. By default only the latter are measured, greedily and at temperature 0.7
with a seed each, with one, four and eight clients. Answers end where the model ends them. No run
reuses an earlier run's answers.

Small models repeat themselves, mostly in languages that they do not speak, and repetition is easy
to guess. So the first figure is that of English questions whose answers do not repeat themselves;
the others have separate rows.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from bench.models import BenchModel
from bench.prompts import Prompt
from bench.speculation import ways
from bench.speculation.ways import PLAIN, Measured, Promises, Runner, Sizes
from bench.tools.report import Outcome, Table, Target, yes
from specops.config import ConfigError
from specops.request import SamplingParams
from specops.runtime import kernels

PROMPTS = Path(__file__).resolve().parents[1] / "chat_prompts.json"
AT_ONCE = (4, 8)
GREEDY, TEMPERATURE = "greedy", 0.7
SAMPLED = f"temperature {TEMPERATURE}"
HELD_OUT, CHOOSING = "held out", "choosing"  # parts of PROMPTS
ENGLISH = "en"
FRESH, REST = "English, without repetition", "the others"
_REPEATED, _WORDS = 0.1, 6  # an answer repeats itself if it repeats this share of its word groups
_ANYWHERE = 1.0  # minimum speed relative to plain decoding
_WHOLE = {GREEDY: 1.5, SAMPLED: 1.25}  # the same on FRESH with one client
_OFF = 0.04  # maximum error of a promised probability, if promised `_OFTEN` times
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
    """How much to measure: at most `each` questions of every kind and language.

    With several clients one round is too short: the same rows differed by 0.1 between two runs.
    """

    each: int
    sizes: Sizes  # for one client
    rounds: int  # for several


FULL = Plan(25, Sizes(new_tokens=200), rounds=3)
QUICK = Plan(1, Sizes(new_tokens=48), rounds=1)


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
    """Whether the text repeats a tenth or more of its groups of six words."""
    words = text.split()
    groups = [tuple(words[place : place + _WORDS]) for place in range(len(words) - _WORDS + 1)]
    return bool(groups) and 1 - len(set(groups)) / len(groups) >= _REPEATED


def run(model: BenchModel, plan: Plan, *, part: str = HELD_OUT) -> Outcome:
    """Ask one by one and several at a time; plain decoding and adaptive drafts take turns.

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
        name: _measured(runner, some, plan, english)
        for name, some in ((GREEDY, prompts), (SAMPLED, drawn))
    }
    which = f"{len(asked)} questions ({part})"
    return outcome(model, found, plan.sizes, f"{which}, {plan.rounds} times with several clients,")


def _measured(
    runner: Runner, prompts: Sequence[Prompt], plan: Plan, english: Collection[str]
) -> dict[str, Measured]:
    """Measure with one client, then answers with and without repetition with several.

    Args:
        runner: runs the requests.
        prompts: the questions.
        plan: how much to measure.
        english: texts of the English questions.
    """
    alone = ways.measure(runner, [runner.own], prompts, plan.sizes)
    found = parted(alone, english)
    fresh = {batch[0].text for batch in found[FRESH].batches} if FRESH in found else set()
    for clients in AT_ONCE:
        for name, wanted in ((FRESH, True), (REST, False)):
            some = [prompt for prompt in prompts if (prompt.text in fresh) is wanted]
            if len(some) >= clients:
                together = replace(plan.sizes, at_once=clients, rounds=plan.rounds)
                row = f"{name}, {clients} clients"
                found[row] = ways.measure(runner, [runner.own], some, together)
    return found


def parted(alone: Measured, english: Collection[str]) -> dict[str, Measured]:
    """Split one client's results by language and repetition, then FRESH by kind; the last is all.

    Args:
        alone: results of batches of one prompt each.
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
    """A table for each way to draw tokens, with a row for each part of its results.

    Args:
        model: the model.
        found: results by way to draw tokens and by part.
        sizes: how much was measured.
        which: which questions.
    """
    every = [measured for parts in found.values() for measured in parts.values()]
    (own,) = [config for config in every[0].runs if config != PLAIN]
    rows = {
        name: {part: measured.row(own) for part, measured in parts.items()}
        for name, parts in found.items()
    }
    sound = all(row.equal == row.repeatable for part in rows.values() for row in part.values())
    notes = (
        f"{which} of {PROMPTS.name}, up to {sizes.new_tokens} tokens, {kernels.kernel()} kernels; "
        "one client unless a number is given",
        f"repeating: the answer repeats a tenth or more of its groups of {_WORDS} words",
        *ways.HOW,
        f"all outputs equal to plain decoding's: {yes(sound)}",
    )
    tables = [
        Table.of(
            f"Chat, {name}: {model.title}, {own.label}",
            [{"questions": part, **row.cells} for part, row in parts.items()],
            notes if name == GREEDY else (),
        )
        for name, parts in rows.items()
    ]
    # The rows before "all" are part of it.
    once = [
        measured
        for parts in found.values()
        for part, measured in parts.items()
        if part == "all" or part.endswith("clients")
    ]
    promises = sum((measured.promises(own) for measured in once), Promises())
    targets = [  # FRESH has a higher one
        Target(
            f"{name}, {part}: whole time over plain",
            _WHOLE[name] if part == FRESH else _ANYWHERE,
            row.whole_speedup,
        )
        for name, parts in rows.items()
        for part, row in parts.items()
    ]
    off = promises.most_off(_OFTEN)
    targets.append(Target("promised minus kept acceptance", _OFF, off, at_most=True))
    drawn = {
        name: {part: asdict(row) for part, row in parts.items()} for name, parts in rows.items()
    }
    result = {"model": model.key, "questions": which, **asdict(sizes), "lossless": sound}
    result |= {"drawn": drawn, "promises": promises.record()}
    return Outcome(result, [*tables, promises_table(promises)], targets=targets, sound=sound)


def promises_table(promises: Promises) -> Table:
    """A row for each source and tenth of the promised probability."""
    lines: Sequence[tuple[str, ...]] = [
        (source, f"{tenth / 10:.1f}", str(made), f"{promised / made:.3f}", f"{kept / made:.3f}")
        for (source, tenth), (made, promised, kept) in sorted(promises.counts.items())
    ]
    return Table(
        "Promised and kept acceptance",
        ("source", "from", "draft tokens", "promised", "kept"),
        lines,
        (
            "by tenth of the promised probability, over all runs above; of verified draft tokens "
            "whose predecessors were all accepted",
        ),
    )
