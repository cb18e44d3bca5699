"""An HTTP handler's view of its requests: their outputs as they come, and a way to cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from specops.request import GenerationRequest, Output


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Place of a request in the queue at its admission.

    Attributes:
        position: 0 if a slot is free; otherwise how many wait for one, this one included.
        wait_seconds: expected wait for a slot: short prompts wait less, long ones more.
    """

    position: int
    wait_seconds: float


@dataclass(eq=False)
class RequestHandle:
    """One or several requests in flight.

    Attributes:
        requests: the requests.
        queue_position: queue position of the first request at its admission.
        cancel: ends the requests; does nothing for a request that has ended.
        end: ends the answer to the request with this id, as a stop string does.
    """

    requests: Sequence[GenerationRequest]
    queue_position: QueuePosition
    cancel: Callable[[], None]
    end: Callable[[str], None]
    _outputs: list[Output] = field(default_factory=list, init=False)
    _came: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def deliver(self, output: Output) -> None:
        """Hand an output to the handler that iterates."""
        self._outputs.append(output)
        self._came.set()

    async def outputs(self, pause: float | None = None) -> AsyncIterator[list[Output]]:
        """Yield the outputs that have come, until all requests have finished; call this once.

        To wake a handler takes longer than to write an output, so it gets all that there are.

        Args:
            pause: seconds without an output after which an empty list comes; None: never.
        """
        loop, unfinished = asyncio.get_running_loop(), len(self.requests)
        latest, timer = loop.time(), None

        def look(pause: float) -> None:
            """End a silence. An answer has a single timer: setting one takes as long as a wait."""
            nonlocal timer
            if (left := latest + pause - loop.time()) <= 0:
                self._came.set()
            timer = loop.call_later(left if left > 0 else pause, look, pause)

        if pause is not None:
            timer = loop.call_later(pause, look, pause)
        try:
            while unfinished:
                await self._came.wait()
                self._came.clear()
                latest, outputs, self._outputs = loop.time(), self._outputs, []
                unfinished -= sum([output.finish is not None for output in outputs])
                yield outputs
        finally:
            if timer is not None:
                timer.cancel()
