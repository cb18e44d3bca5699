"""Plays a typing trace against a server, without the time in which nothing would happen.

A trace of ten minutes has two thousand key strokes, and most are followed by the next one sooner
than any suggestion comes. What is played of a visit to a place: all that warms the cache, the jump,
the first key of each line, and some pauses within a line or at its end, each with the two key
strokes before it. Those two are sent at their times, and the next key closes their connection if no
answer has come; at all others the typist waits for the suggestion, however long it takes, and goes
on at once. So which key strokes are measured does not depend on how fast a server is.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event as Flag
from typing import Any, Literal

from bench.serving.load import Answer, Ask, Script, ServerError, once
from loadtest.editor_trace import Event

TOKENS = 16  # of a suggestion
PAUSE_SECONDS = 0.7  # the typist looks at the screen
_HASTY = 2  # key strokes before a pause that are played
_PAUSES = 3  # of a visit
CHATS, _CHAT_TOKENS = 2, 64
# The same work for both: llama-server has no limit of time within a line, and neither draws tokens.
_SAME = {"n_predict": TOKENS, "t_max_predict_ms": 5000, "n_indent": 0, "top_k": 1}

Kind = Literal["warm", "jump", "new line", "line", "hasty"]


@dataclass(frozen=True, slots=True)
class Stroke:
    """A request of the trace, and after how many seconds the next key comes; None: it waits."""

    kind: Kind
    body: dict[str, Any]
    gap: float | None = None


@dataclass(slots=True)
class Played:
    """What came of a trace.

    Attributes:
        seconds: from the key stroke to the suggestion, by kind, where the typist waited.
        read: tokens of these requests' prompts that were computed.
        hasty: number of key strokes that the next one followed at once.
        cancelled: number of those whose answer had not come.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    read: dict[str, list[int]] = field(default_factory=dict)
    hasty: int = 0
    cancelled: int = 0


def strokes(events: Sequence[Event]) -> Iterator[Stroke]:
    """Yield what is played of a trace; see above."""
    hasty: list[Stroke] = []
    pauses = 0
    for before, event, after in zip((None, *events), events, (*events[1:], None), strict=False):
        gap = PAUSE_SECONDS if after is None else after.at - event.at
        if event.kind != "key" or before is None:
            hasty, pauses = [], 0
            yield Stroke("jump" if event.kind == "key" else event.kind, event.body)
        elif event.body["input_prefix"] != before.body["input_prefix"]:
            hasty = []
            yield Stroke("new line", event.body)
        elif gap < PAUSE_SECONDS:
            hasty.append(Stroke("hasty", event.body, gap))
        elif pauses < _PAUSES:
            pauses += 1
            yield from hasty[-_HASTY:]
            yield Stroke("line", event.body)
            hasty = []


async def play(port: int, trace: Sequence[Stroke]) -> Played:
    """Send a trace's requests.

    Raises:
        ServerError: a request that was waited for failed, or has not `TOKENS` tokens.
    """
    played = Played()
    for stroke in trace:
        own = {} if stroke.kind == "warm" else _SAME
        asked = Ask("/infill", {**stroke.body, **own, "response_fields": ["timings"]})
        sending = asyncio.create_task(once(port, asked))
        await asyncio.wait({sending}, timeout=stroke.gap)
        if stroke.kind == "hasty":
            played.hasty += 1
        if not sending.done():
            played.cancelled += 1
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
            continue
        answer = sending.result()
        timings = _timings(answer, 0 if stroke.kind == "warm" else TOKENS)
        if stroke.kind != "hasty":
            played.seconds.setdefault(stroke.kind, []).append(answer.seconds)
            played.read.setdefault(stroke.kind, []).append(timings["prompt_n"])
    return played


def _timings(answer: Answer, least: int) -> dict[str, Any]:
    timings: dict[str, Any] = answer.checked().events[0]["timings"]
    if timings["predicted_n"] < least:
        raise ServerError(f"a suggestion has {timings['predicted_n']} tokens, not {least}")
    return timings


def chats(files: Sequence[str], done: Flag, answers: list[Answer]) -> Iterator[Script]:
    """Scripts of clients that have one long answer streamed after the other, until `done`."""
    for number in range(CHATS):
        yield _chat(random.Random(number), files, done, answers)


def _chat(rng: random.Random, files: Sequence[str], done: Flag, answers: list[Answer]) -> Script:
    while not done.is_set():
        lines = rng.choice(files).splitlines()
        begin = rng.randrange(len(lines) - 20)
        prompt = "\n".join(lines[begin : begin + 20])
        body = {"prompt": prompt, "n_predict": _CHAT_TOKENS, "temperature": 0, "stream": True}
        answers.append((yield Ask("/completion", body | {"ignore_eos": True})))
