"""Plays a typing trace against a server, without the time in which nothing would happen.

A trace of ten minutes has two thousand keystrokes, and most come too soon after the previous one
for a suggestion. Of each visit to a place, the benchmark plays the requests that warm the cache,
the jump, the first key of each line, and some pauses within a line or at its end, each with the two
keystrokes before it. Those two are sent at their original times, and the next key closes their
connection if no answer has come. After all others the typist waits for the suggestion, however long
it takes, and continues at once. So the measured keystrokes do not depend on a server's speed.
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

TOKENS = 16  # per suggestion
PAUSE_SECONDS = 0.7  # in which the typist looks at the screen
_HASTY = 2  # keystrokes played before a pause
_PAUSES = 3  # per visit
CHATS, _CHAT_TOKENS = 2, 64
# Equal work for both sides: no time limit within a line, and greedy decoding.
_SAME = {"n_predict": TOKENS, "t_max_predict_ms": 5000, "n_indent": 0, "top_k": 1}

Kind = Literal["warm", "jump", "new line", "line", "hasty"]


@dataclass(frozen=True, slots=True)
class Stroke:
    """A request of the trace, and the seconds to the next key; None: the typist waits."""

    kind: Kind
    body: dict[str, Any]
    gap: float | None = None


@dataclass(slots=True)
class Played:
    """The results of a trace.

    Attributes:
        seconds: from keystroke to suggestion, by kind, for which the typist waited.
        read: computed tokens of these requests' prompts, by kind.
        hasty: number of keystrokes that the next one followed without waiting.
        cancelled: number of hasty keystrokes without an answer in time.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    read: dict[str, list[int]] = field(default_factory=dict)
    hasty: int = 0
    cancelled: int = 0


def strokes(events: Sequence[Event]) -> Iterator[Stroke]:
    """Yield the played requests of a trace; see the module's docstring."""
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
        ServerError: a request failed for which the typist waited, or has fewer than `TOKENS`.
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
    """Scripts of clients that stream one long answer after the other until `done` is set."""
    for number in range(CHATS):
        yield _chat(random.Random(number), files, done, answers)


def _chat(rng: random.Random, files: Sequence[str], done: Flag, answers: list[Answer]) -> Script:
    while not done.is_set():
        lines = rng.choice(files).splitlines()
        begin = rng.randrange(len(lines) - 20)
        prompt = "\n".join(lines[begin : begin + 20])
        body = {"prompt": prompt, "n_predict": _CHAT_TOKENS, "temperature": 0, "stream": True}
        answers.append((yield Ask("/completion", body | {"ignore_eos": True})))
