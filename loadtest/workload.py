"""Makes the load test's requests: texts, lengths, conversations and pauses, determined by the seed.

Conversation number k depends only on the seed and k, or is line k of a file. Several processes
divide the numbers, so that together they send the same requests as one process. A process that
joins during a run has different numbers, no lines of a file, and no share of the limits, which were
divided at the start.
"""

import math
import random
from argparse import Namespace
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from texts import CHAT, CODE, KINDS, NO_FRAME, Encode, Frame, Text, Writer
from traces import Entry, entries

EDITOR = "editor"  # the category of suggestions while somebody types
# Quantiles of lengths in tokens, with linear interpolation: conversations of Azure's LLM inference
# trace of 2023 (data of Microsoft Azure, CC-BY 4.0; Splitwise, ISCA 2024).
_SHARES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1)
_PROMPTS = (20, 89, 117, 193, 205, 373, 392, 421, 1037, 1119, 1313, 1439, 4073, 4094)
_ANSWERS = (12, 16, 43, 63, 87, 105, 144, 170, 183, 224, 383, 399, 414, 426)
MEDIAN_PROMPT, MEDIAN_ANSWER = _PROMPTS[6], _ANSWERS[6]
_ROUND = 20  # consecutive requests that cover all lengths
_FREQUENT = 8  # number of questions of --repeat-share
_FOLLOW_UP = 40  # tokens of a later turn
_NEAR = 0.85  # share of the context from which on the server counts a generated text's tokens
_SHORTER = 0.97  # factor for a length that turned out too long
_LATE = 1 << 32  # more than the conversations of a process in a run


@dataclass(frozen=True, slots=True)
class Server:
    """The served model's properties that prompts depend on.

    Attributes:
        encode: the model's tokenizer.
        chat: whether the model chats; otherwise it continues texts.
        context: maximum tokens of a prompt and its answer together.
        answer: maximum tokens of an answer.
        frame: tokens that the chat template adds.
    """

    encode: Encode
    chat: bool = True
    context: float = math.inf
    answer: float = math.inf
    frame: Frame = NO_FRAME


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation, with one request per turn.

    Attributes:
        turns: the user's texts.
        tokens: maximum tokens of each answer.
        pauses: seconds of thinking before each turn.
        system: the system message, possibly empty; None: the turns are texts to continue.
        history: earlier texts of user and assistant, in turn.
        at: start in seconds after the first request of a trace.
        cut: whether something was shortened to the model's limits.
    """

    turns: tuple[str, ...]
    tokens: tuple[int, ...]
    pauses: tuple[float, ...]
    system: str | None
    history: tuple[str, ...] = ()
    at: float | None = None
    cut: bool = False


def place(worker: str, number: int, workers: Sequence[str]) -> int:
    """A worker's index in its run; workers that joined later come after all others.

    Args:
        worker: id of the worker.
        number: number of the worker among all that the master has ever seen.
        workers: ids of the workers at the start of the run.
    """
    return workers.index(worker) if worker in workers else len(workers) + number


def share(total: int, index: int, processes: int) -> int:
    """The share of process number `index` of a total; 0 if it joined after the start."""
    return total // processes + (index < total % processes) if index < processes else 0


class Workload:
    """One process's part of a run.

    Args:
        options: the load test's options.
        server: properties of the served model.
        path: a file with requests; None: they are generated.
        seed: determines everything that is not in a file.
        index, processes: which of how many processes this is; a larger index joined later.

    Attributes:
        exhausted: whether the whole file has been read.
    """

    def __init__(
        self,
        options: Namespace,
        server: Server,
        path: Path | None = None,
        *,
        seed: str,
        index: int = 0,
        processes: int = 1,
    ) -> None:
        self.options, self.server, self.seed = options, server, seed
        self.index, self.processes = index, processes
        if options.kind_of_prompt != EDITOR:
            self.writer = Writer(server.encode, server.frame, chat=server.chat)
        self._entries = entries(path, index, processes) if path else None
        self.exhausted = False
        self._begun = 0
        most = options.number_of_requests
        self._left = share(most, index, processes) if most else None
        self._late = index >= processes
        if self._late and options.max_concurrency:
            self._left = 0  # the other processes have it all

    def conversation(self) -> Conversation | None:
        """The next conversation of this process; None after a file's last line."""
        first, step = (self.index * _LATE, 1) if self._late else (self.index, self.processes)
        number = first + step * self._begun
        self._begun += 1
        if self._entries is None:
            return self.numbered(number)
        if (entry := next(self._entries, None)) is None:
            self.exhausted = True
            return None
        return self._of(entry, number)

    def claim(self) -> bool:
        """Whether one more request may be sent."""
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0

    def numbered(self, number: int) -> Conversation:
        """Generate conversation number `number`."""
        options, rng = self.options, self._rng(number)
        pauses = self._pauses(options.turns, rng)
        if rng.random() < options.repeat_share:
            number = rng.randrange(_FREQUENT)
            rng = self._rng(f"frequent:{number}")
        of_prompt, of_answer = self._shares(number, rng)
        later = [round(_length(_ANSWERS, rng.random())) for _ in range(options.turns - 1)]
        known = [round(_length(_ANSWERS, of_answer)), *later]
        answers, cut = self._answers([round(n * options.length_scale) or 1 for n in known], rng)
        drawn = _length(_PROMPTS, of_prompt) * options.length_scale
        wanted = self._varied(options.prompt_tokens, rng) if options.prompt_tokens else drawn
        prefix = self._prefix(rng.randrange(options.prefixes)) if options.prefix_tokens else ""
        others = options.prefix_tokens + (_FOLLOW_UP + self.server.frame.turn) * (options.turns - 1)
        room = self.server.context - sum(answers) - others
        text = self._within(room, wanted, lambda length: self._made(length, rng))
        cut = cut or wanted > room
        turns = (text.prompt, *(self.writer.follow_up(rng, text) for _ in answers[1:]))
        system = (prefix or text.system) if self.server.chat else None
        if prefix and not self.server.chat:
            turns = (f"{prefix}\n\n{turns[0]}", *turns[1:])
        return Conversation(turns, answers, pauses, system, text.history, cut=cut)

    def _of(self, entry: Entry, number: int) -> Conversation:
        """The conversation of a file's line; a prompt is generated if only its length is known."""
        rng, server = self._rng(number), self.server
        scale = 1.0 if entry.turns else self.options.length_scale
        known = [round(tokens * scale) for tokens in entry.answers[: self.options.turns]]
        answers, cut = self._answers(known, rng)
        pauses, room = self._pauses(len(answers), rng), server.context - sum(answers)
        if entry.turns:
            texts = [entry.system, *entry.turns[: len(answers)]]
            fitting = self._cut(texts, room)
            system, turns, history = fitting[0], tuple(fitting[1:]), ()
            cut = cut or fitting != texts
        else:
            wanted = max(1, round(entry.length * scale))
            text = self._within(
                room,
                wanted,
                lambda length: (
                    self._blocks(entry, length, rng) if entry.blocks else self._made(length, rng)
                ),
            )
            system, turns, history = text.system, (text.prompt,), text.history
            cut = cut or wanted > room
        shown = system if server.chat else None
        return Conversation(turns, answers, pauses, shown, history, entry.at, cut)

    def _rng(self, what: object) -> random.Random:
        return random.Random(f"{self.seed}:{what}")

    def _shares(self, number: int, rng: random.Random) -> Iterator[float]:
        """Yield the quantiles of the lengths of a prompt and an answer.

        Each of `_ROUND` consecutive requests has another part of the range, in random order, so
        that short runs have the same distribution as long ones.
        """
        turn, place = divmod(number, _ROUND)
        order = self._rng(f"round:{turn}")
        for parts in (order.sample(range(_ROUND), _ROUND), order.sample(range(_ROUND), _ROUND)):
            yield (parts[place] + rng.random()) / _ROUND

    def _pauses(self, turns: int, rng: random.Random) -> tuple[float, ...]:
        mean = self.options.think_time
        return tuple(rng.expovariate(1 / mean) if mean else 0.0 for _ in range(turns))

    def _answers(self, known: Sequence[int], rng: random.Random) -> tuple[tuple[int, ...], bool]:
        """Tokens of the answers, and whether the model's limits shortened them."""
        options, server = self.options, self.server
        wanted = [
            self._varied(options.answer_tokens, rng)
            if options.answer_tokens
            else tokens or max(1, round(_length(_ANSWERS, rng.random()) * options.length_scale))
            for tokens in known
        ]
        most = min(server.answer, server.context // (2 * len(wanted)))
        answers = tuple(int(min(tokens, most)) for tokens in wanted)
        return answers, [*answers] != wanted

    def _within(self, room: float, wanted: float, make: Callable[[float], Text]) -> Text:
        """A generated text that fits; near the limit, the server counts its tokens.

        Args:
            room: maximum number of tokens.
            wanted: wanted number of tokens.
            make: generates a text with about this many tokens.
        """
        length = min(wanted, room)
        text, frame = make(length), self.server.frame
        while length > _NEAR * room and length > 1:
            texts = [text.system, *text.history, text.prompt]
            tokens = len(self.server.encode("\n".join(texts))) + sum(
                (frame.question, frame.system, frame.turn)
            )
            if tokens <= room:
                break
            length *= _SHORTER
            text = make(length)
        return text

    def _made(self, tokens: float, rng: random.Random) -> Text:
        kind = self.options.kind_of_prompt
        if kind == "all":
            fitting = [kind for kind, least in KINDS.items() if tokens >= least]
            kind = rng.choice(fitting or [CHAT]) if self.server.chat else CODE
        return self.writer.text(rng, kind, tokens)

    def _prefix(self, number: int) -> str:
        """One of the shared prefixes."""
        rng, tokens = self._rng(f"prefix:{number}"), self.options.prefix_tokens
        writer = self.writer
        return writer.role(rng, tokens) if self.server.chat else writer.code(rng, tokens)

    def _blocks(self, entry: Entry, tokens: float, rng: random.Random) -> Text:
        """A text with equal text for equal blocks, and a unique end."""
        left, parts = tokens - self.server.frame.question, list[str]()
        for number in entry.blocks:
            if left <= 0:
                break
            block = self.writer.block(self._rng(f"block:{number}"), entry.block)
            parts.append(block if left >= entry.block else self.writer.ruler.cut(block, left))
            left -= entry.block
        if left > 0:
            parts.append(self.writer.block(rng, left))
        return Text(" ".join(parts))

    def _cut(self, texts: Sequence[str], room: float) -> list[str]:
        """Texts of a file, shortened to fit."""
        fitting = []
        room -= self.server.frame.question
        for text in texts:
            # A text never has more tokens than bytes. The server counts longer ones.
            spelled = self.server.encode(text) if len(text.encode()) > room else []
            if len(spelled) > room:
                spelled = spelled[: max(1, int(room))]
                fitting.append(b"".join(spelled).decode(errors="ignore"))
            else:
                fitting.append(text)
            room -= len(spelled) or self.writer.ruler.count(text)
            room -= self.server.frame.turn
        return fitting

    def _varied(self, length: float, rng: random.Random) -> int:
        spread = self.options.length_spread
        return max(1, round(length * rng.uniform(1 - spread, 1 + spread)))


def _length(lengths: Sequence[int], share: float) -> float:
    """The quantile of lengths at `share`."""
    at = bisect(_SHARES, share) - 1
    part = (share - _SHARES[at]) / (_SHARES[at + 1] - _SHARES[at])
    return lengths[at] + part * (lengths[at + 1] - lengths[at])
