"""Makes typing traces: llama.vim's requests to `/infill` while somebody edits a project's files.

The typist goes to a place in a file, deletes a few lines or the end of one, and types them again,
character by character; then saves, and continues elsewhere. The requests have the fields and texts
of llama.vim (commit a1c8e6e, default settings): the lines around the cursor, and chunks of text
from places visited before, which the server reads ahead while nobody types. The caller decides what
happens to a request whose answer has not come when the next one is due.

The same files, seconds and seed make the same trace. The time between keys is that of 136 million
keystrokes (Dhakal et al., CHI 2018: 0.24 s on average), with pauses before lines and words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

# llama.vim's settings and constants.
N_PREFIX, N_SUFFIX = 256, 64  # lines before and after the cursor
RING_CHUNKS, RING_QUEUE, CHUNK_LINES, RING_SCOPE = 16, 16, 64, 1024
PICK_DISTANCE = 32  # minimum number of lines between two picks of chunks
SAME_CHUNK, SAME_PLACE = 0.9, 0.5  # similarities
_COMMON: dict[str, Any] = {"id_slot": 0, "stream": False, "cache_prompt": True, "model": ""}
WARMING: dict[str, Any] = {
    **_COMMON, "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0,
    "temperature": 0.0, "samplers": [], "t_max_prompt_ms": 1, "t_max_predict_ms": 1,
    "response_fields": [""],
}  # fmt: skip
ASKING: dict[str, Any] = {
    **_COMMON, "n_predict": 128, "stop": [], "top_k": 40, "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"], "t_max_prompt_ms": 500, "t_max_predict_ms": 250,
    "response_fields": [
        "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
        "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
        "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated",
        "tokens_cached",
    ],
}  # fmt: skip

# The typist.
KEY_SECONDS, KEY_SIGMA = 0.18, 0.5  # median and spread, lognormal
PAUSE_SECONDS, PAUSE_SIGMA, MAX_PAUSE = 1.0, 0.6, 3.0  # before a line, and some words
WORD_PAUSES, OTHER_FILE, REST_OF_LINE = 0.1, 0.4, 0.4  # probabilities
MAX_LINES, LOOKING_SECONDS = 4, (2, 6)  # per visit


@dataclass(frozen=True, slots=True)
class Event:
    """A request of the trace.

    Attributes:
        at: seconds since the start, ascending.
        kind: `key`: a character was typed; `jump`: the cursor is in a new place; `warm`: a request
            that reads ahead, for whose answer nobody waits.
        body: the request's fields.
    """

    at: float
    kind: Literal["key", "jump", "warm"]
    body: dict[str, Any]


def trace(files: dict[str, str], seconds: float, seed: int) -> Iterator[Event]:
    """Yield the requests of a typing trace, in order of time.

    Args:
        files: the project's files, by name.
        seconds: length of the trace; `math.inf`: it never ends.
        seed: determines places, times and chunks.

    Raises:
        ValueError: no file has anything to type.
    """
    places = [
        (name, row)
        for name, text in files.items()
        for row, line in enumerate(text.splitlines())
        if line.strip()
    ]
    if not places:
        raise ValueError("a typing trace needs a file with text")
    events = _type(files, places, random.Random(seed))
    return takewhile(lambda event: event.at < seconds, events)


def _type(
    files: dict[str, str], places: Sequence[tuple[str, int]], rng: random.Random
) -> Iterator[Event]:
    texts = {name: text.splitlines() for name, text in files.items()}
    ring, at, name, picked = _Ring(rng), 0.0, "", -1000
    while True:
        if not name or rng.random() < OTHER_FILE:
            name, _ = rng.choice(places)
        name, first = rng.choice([place for place in places if place[0] == name])
        lines = texts[name]
        ring.pick(_around(lines, first), name, at, replace=True)
        for _ in range(rng.randint(*LOOKING_SECONDS)):
            at += 1.0
            if ring.advance():
                yield Event(at, "warm", {**WARMING, "input_extra": ring.extra()})
        kind: Literal["key", "jump"] = "jump"
        last = min(len(lines), first + rng.randint(1, MAX_LINES))
        for row in range(first, last):
            line, begin = lines[row], len(lines[row]) - len(lines[row].lstrip())
            if row == first and rng.random() < REST_OF_LINE:
                begin = rng.choice([word.end() for word in re.finditer(r"\w+|$", line)])
            for column in range(begin, len(line) + 1):
                at += _delay(line[begin:column], rng)
                ring.forget(_around(lines, row))
                typed = line[:column] if line[:column].strip() else ""
                around: dict[str, Any] = {
                    "input_prefix": "\n".join(lines[max(0, row - N_PREFIX) : row]) + "\n",
                    "input_suffix": "\n" + "\n".join(lines[last : last + N_SUFFIX]) + "\n",
                    "input_extra": ring.extra(),
                    "prompt": typed,
                    "n_indent": len(typed) - len(typed.lstrip()),
                }
                yield Event(at, kind, ASKING | around)
                kind = "key"
            if abs(row - picked) > PICK_DISTANCE:
                picked = row
                far = row + N_SUFFIX
                ring.pick(lines[max(0, row - RING_SCOPE) : max(0, row - N_PREFIX)], name, at)
                ring.pick(lines[far : far + CHUNK_LINES], name, at)
        ring.pick(_around(lines, last - 1), name, at, replace=True)


def _around(lines: Sequence[str], row: int) -> Sequence[str]:
    return lines[max(0, row - CHUNK_LINES // 2) : row + CHUNK_LINES // 2 + 1]


def _delay(typed: str, rng: random.Random) -> float:
    """Seconds before the next key, after the typed part of a line."""
    thinks = not typed or (not typed[-1].isalnum() and rng.random() < WORD_PAUSES)
    if thinks:
        return min(PAUSE_SECONDS * rng.lognormvariate(0, PAUSE_SIGMA), MAX_PAUSE)
    return KEY_SECONDS * rng.lognormvariate(0, KEY_SIGMA)


class _Chunk:
    """Lines of a file at a given time."""

    def __init__(self, lines: Sequence[str], name: str, at: float) -> None:
        self.lines = tuple(lines)
        text = "\n".join(lines)
        self.words = re.split(r"\W+", text)
        time = [int(at), int(at % 1 * 1_000_000)]
        self.extra = {"text": text + "\n", "time": time, "filename": name}

    def similarity(self, other: _Chunk) -> float:
        """Share of common words, 0 to 1."""
        mine = {*self.words}
        common = sum(word in mine for word in other.words)
        return 2 * common / (len(self.words) + len(other.words))


class _Ring:
    """The chunks that every request contains, and those queued for reading ahead."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.chunks: list[_Chunk] = []
        self.queued: list[_Chunk] = []

    def pick(self, lines: Sequence[str], name: str, at: float, *, replace: bool = False) -> None:
        """Queue part of the lines; `replace` decides whether it replaces a similar chunk."""
        if len(lines) < 3:
            return
        new = _Chunk(self._part(lines), name, at)
        every = (*self.queued, *self.chunks)
        similar = {id(c) for c in every if c.similarity(new) > SAME_CHUNK}
        if any(chunk.lines == new.lines for chunk in every) or (similar and not replace):
            return
        self.chunks = [chunk for chunk in self.chunks if id(chunk) not in similar]
        self.queued = [chunk for chunk in self.queued if id(chunk) not in similar]
        self.queued = [*self.queued[-RING_QUEUE + 1 :], new]

    def advance(self) -> bool:
        """Add the oldest queued chunk to the next requests; return whether there was one."""
        if not self.queued:
            return False
        self.chunks = [*self.chunks[-RING_CHUNKS + 1 :], self.queued.pop(0)]
        return True

    def forget(self, around: Sequence[str]) -> None:
        """Drop the chunks similar to the lines around the cursor, which the request has anyway."""
        local = _Chunk(self._part(around), "", 0.0)
        self.chunks = [c for c in self.chunks if c.similarity(local) <= SAME_PLACE]

    def extra(self) -> list[dict[str, Any]]:
        """The chunks in the format of a request."""
        return [{**chunk.extra} for chunk in self.chunks]

    def _part(self, lines: Sequence[str]) -> Sequence[str]:
        """Half a chunk's lines, from a random place."""
        half = CHUNK_LINES // 2
        if len(lines) + 1 < CHUNK_LINES:
            return lines
        begin = self.rng.randint(0, max(0, len(lines) - half))
        return lines[begin : begin + half + 1]
