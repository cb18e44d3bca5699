"""Stand-ins for the service below the API: they say what they are told to, when they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from specops.engine import ModelInfo, ModelState
from specops.request import (
    TARGET,
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Output,
    Piece,
)

INFO = ModelInfo(
    name="fake",
    quant="int8-128",
    parameters=8_000_000,
    draft_parameters=800_000,
    draft_quant="int8-128",
    drafters=("draft", "ngram", "none"),
    default_drafter="draft",
    vocab_size=256,
    context=64,
    rows=2,
    kv_bytes=1024,
    threads=1,
    exact_align=2,
)
STATS = GenerationStats(
    prompt_tokens=3,
    generated_tokens=5,
    sequence_steps=2,
    drafts=1,
    draft_misses=1,
    draft_tokens=3,
    accepted_tokens=2,
    accepted_per_position=(1, 1, 0),
    queue_seconds=0.25,
    prefill_seconds=0.5,
    decode_seconds=2.0,
)


def output(*texts: str, finish: FinishReason | None = None, origin: str = TARGET) -> Output:
    """One step's output: a piece per text; with statistics if it is the last."""
    pieces = tuple(Piece(len(text), text, origin) for text in texts)
    return Output("fake", pieces, finish, STATS if finish else None)


class FakeTicket:
    """Yields what is pushed, raises pushed exceptions; ends as told, or when cancelled."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.request_id = request.request_id
        self.cancelled = asyncio.Event()
        self._outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._ended = False

    def push(self, *outputs: Output | Exception) -> FakeTicket:
        for item in outputs:
            self._outputs.put_nowait(item)
        return self

    def cancel(self) -> None:
        if not self._ended and not self.cancelled.is_set():
            self.cancelled.set()
            self.push(output(finish=FinishReason.CANCELLED))

    async def __aiter__(self) -> AsyncIterator[Output]:
        while not self._ended:
            item = await self._outputs.get()
            if isinstance(item, Exception):
                raise item
            self._ended = item.finish is not None
            yield item


class FakeService:
    """Has the surface of `Service`; `answer` is what every request is told, if it is given.

    Without `answer` a test takes the tickets from `submitted` and pushes to them itself.
    """

    def __init__(self, answer: Iterable[Output] | None = None) -> None:
        self.state = ModelState.READY
        self.error: str | None = None
        self.detail = ""
        self.alive = True
        self.info: ModelInfo | None = INFO
        self.running = 0
        self.waiting = 0
        self.refusal: Exception | None = None
        self.calls: list[str] = []
        self.requests: list[GenerationRequest] = []
        self.submitted: asyncio.Queue[FakeTicket] = asyncio.Queue()
        self.stopping = asyncio.Event()
        self.may_stop = asyncio.Event()  # a test that watches the draining clears it
        self.may_stop.set()
        self._answer = None if answer is None else tuple(answer)

    def start(self) -> None:
        self.calls.append("start")

    async def stop(self) -> None:
        self.calls.append("stop")
        self.state = ModelState.DRAINING
        self.stopping.set()
        await self.may_stop.wait()

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def submit(self, request: GenerationRequest) -> FakeTicket:
        if self.refusal:
            raise self.refusal
        ticket = FakeTicket(request)
        if self._answer is not None:
            ticket.push(*self._answer)
        self.requests.append(request)
        self.submitted.put_nowait(ticket)
        return ticket
