"""What an HTTP handler holds of its requests: their outputs as they come, and a way to cancel."""

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
    _outputs: asyncio.Queue[Output] = field(default_factory=asyncio.Queue, init=False)

    def deliver(self, output: Output) -> None:
        """Hand an output to the handler that iterates."""
        self._outputs.put_nowait(output)

    async def outputs(self, pause: float | None = None) -> AsyncIterator[Output | None]:
        """Iterate over the outputs until all requests have finished; call this once.

        Args:
            pause: seconds without an output after which None comes; None: never.
        """
        unfinished = len(self.requests)
        while unfinished:
            output = None
            try:
                async with asyncio.timeout(pause):
                    output = await self._outputs.get()
            except TimeoutError:
                pass
            else:
                unfinished -= output.finish is not None
            yield output
