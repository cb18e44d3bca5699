"""What the load test asks: texts, lengths, conversations and pauses, the same for the same seed.

Conversation number k depends on the seed and k alone. Of several processes each has its share of
the numbers, so that all together send the same requests as one process would. A process that joins
during a run has numbers of its own, and nothing of limits that were shared out at the start.
"""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHAT = "chat"  # the category of questions
EDITOR = "editor"  # that of suggestions for what somebody types
DATASET = "dataset"  # that of texts from a file
# Lengths of answers without --output-len: half of them are shorter than the median, and most are
# within a factor of two of it, as lengths of texts are.
MEDIAN_TOKENS, SIGMA, SHORTEST, LONGEST = 48, 0.6, 8, 256
_CHARACTERS = 4  # of a token, roughly, where nobody counts
_LATE = 1 << 32  # more conversations than a process has in a run

Encode = Callable[[str], Sequence[bytes]]  # a text's tokens, as their spellings


@dataclass(frozen=True, slots=True)
class Text:
    """What a user says, turn by turn; with the answers' lengths in tokens if they are known."""

    category: str
    turns: tuple[str, ...]
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What to ask, one request per turn.

    Attributes:
        turns: what the user says.
        tokens: the longest answer to each.
        pauses: seconds to think before each.
        question: whether the turns are to be answered, and not continued.
    """

    turns: tuple[str, ...]
    tokens: tuple[int, ...]
    pauses: tuple[float, ...]
    question: bool


def dataset(path: Path) -> list[Text]:
    """Read a data set: lines of JSON or one JSON list.

    An entry has a `prompt` (and perhaps a `category`, and `output_tokens` or
    `output_tokens_count`, the names of vLLM and guidellm), `messages` as in OpenAI's chats, or
    ShareGPT's `conversations`.

    Raises:
        ValueError: it cannot be read, in one line.
    """
    try:
        content = path.read_text("utf-8")
        listed = content.lstrip().startswith("[")
        rows = json.loads(content) if listed else map(json.loads, content.splitlines())
        texts = [text for row in rows if row and (text := _text(row))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"the data set {path} cannot be read: {reason}") from None
    if not texts:
        raise ValueError(f"the data set {path} has no prompts")
    return texts


def _text(row: Mapping[str, Any]) -> Text | None:
    """Return an entry's text; None where a user says nothing."""
    category = row.get("category", DATASET)
    said = [(turn["from"], turn["value"]) for turn in row.get("conversations", ())]
    said = said or [(turn["role"], turn["content"]) for turn in row.get("messages", ())]
    if not said:
        tokens = row.get("output_tokens") or row.get("output_tokens_count")
        return Text(category, (row["prompt"],), (int(tokens),) if tokens else ())
    turns, tokens = [], []
    for (who, text), (next_one, answer) in zip(said, [*said[1:], ("", "")], strict=True):
        if who in ("human", "user"):
            turns.append(text)
            known = next_one in ("gpt", "assistant")
            tokens.append(max(SHORTEST, len(answer) // _CHARACTERS) if known else MEDIAN_TOKENS)
    return Text(category, tuple(turns), tuple(tokens)) if turns else None


TEXTS = dataset(Path(__file__).with_name("prompts.jsonl"))
CATEGORIES = sorted({text.category for text in TEXTS})


def place(worker: str, number: int, workers: Sequence[str]) -> int:
    """A worker's index among those with which a run began; a later one's is beyond them.

    Args:
        number: of this worker among all that the master has ever seen.
    """
    return workers.index(worker) if worker in workers else len(workers) + number


def share(total: int, index: int, processes: int) -> int:
    """What process number `index` has of a total; nothing if it joined after the start."""
    return total // processes + (index < total % processes) if index < processes else 0


class Workload:
    """One process's part of a run.

    Args:
        chat: whether the server has a chat model.
        encode: counts tokens, for prompts of a chosen length.
        index, processes: which of how many processes this is; an index beyond them joined later.
    """

    def __init__(
        self, options: Namespace, *, chat: bool, encode: Encode, index: int = 0, processes: int = 1
    ) -> None:
        self.options = options
        self.index, self.processes = index, processes
        self.chat = chat
        kinds = {options.kind_of_prompt}
        if options.kind_of_prompt == "all":
            kinds = {*CATEGORIES} if chat else {*CATEGORIES} - {CHAT}
        path = options.dataset
        self.texts = dataset(Path(path)) if path else [t for t in TEXTS if t.category in kinds]
        self._spelled: list[list[bytes]] = []
        if options.prompt_tokens:
            self._spelled = [[*encode(turn)] for text in self.texts for turn in text.turns]
        self._begun = 0
        most = options.number_of_requests
        self._left = share(most, index, processes) if most else None
        self._late = index >= processes
        if self._late and options.max_concurrency:
            self._left = 0  # the others have all of it

    def conversation(self) -> Conversation:
        """The next conversation of this process."""
        first, step = (self.index * _LATE, 1) if self._late else (self.index, self.processes)
        number = first + step * self._begun
        self._begun += 1
        return self.numbered(number)

    def claim(self) -> bool:
        """Whether one more request may be sent."""
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0

    def numbered(self, number: int) -> Conversation:
        """Conversation number `number`."""
        options, rng = self.options, random.Random(f"{self.options.seed}:{number}")
        text = rng.choice(self.texts)
        alike = [other for other in self.texts if other.category == text.category]
        turns, known = list(text.turns), list(text.tokens)
        while text.category != DATASET and len(turns) < options.turns:
            turns.append(rng.choice(alike).turns[0])
        turns = turns[: options.turns]
        known += [0] * (len(turns) - len(known))
        mean = options.think_time
        return Conversation(
            turns=tuple(self._fitted(turn, rng) for turn in turns),
            tokens=tuple(self._answer(tokens, rng) for tokens in known[: len(turns)]),
            pauses=tuple(rng.expovariate(1 / mean) if mean else 0.0 for _ in turns),
            question=text.category == CHAT or (text.category == DATASET and self.chat),
        )

    def _fitted(self, text: str, rng: random.Random) -> str:
        """Return texts of the chosen length, or the text as it is."""
        if not self.options.prompt_tokens:
            return text
        length = self._varied(self.options.prompt_tokens, rng)
        place, spelled = rng.randrange(len(self._spelled)), list[bytes]()
        while len(spelled) < length:
            spelled += self._spelled[place % len(self._spelled)]
            place += 1
        return b"".join(spelled[:length]).decode(errors="ignore")

    def _answer(self, known: int, rng: random.Random) -> int:
        if self.options.answer_tokens:
            return self._varied(self.options.answer_tokens, rng)
        drawn = round(MEDIAN_TOKENS * rng.lognormvariate(0, SIGMA))
        return known or min(max(drawn, SHORTEST), LONGEST)

    def _varied(self, length: int, rng: random.Random) -> int:
        spread = self.options.length_spread
        return max(1, round(length * rng.uniform(1 - spread, 1 + spread)))
