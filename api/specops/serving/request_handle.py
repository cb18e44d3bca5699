"""What an HTTP handler holds of its requests: their outputs as they come, and a way to cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from specops.request import GenerationRequest, Output
from specops.serving.queue_tracker import QueuePosition


class RequestHandle:
    """One or several requests in flight. Iterate over it for their outputs, once.

    Ends with the output of the last of them that has `finish` set.

    Args:
        requests: whose outputs come.
        queue_position: of the first of them, when it was let in.
        cancel: ends the requests; does nothing for one that has ended.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        queue_position: QueuePosition,
        cancel: Callable[[], None],
    ) -> None:
        self.requests = tuple(requests)
        self.queue_position = queue_position
        self._cancel = cancel
        self._open = len(requests)
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    def cancel(self) -> None:
        """End the requests; does nothing where all of them have ended."""
        self._cancel()

    def deliver(self, output: Output) -> None:
        """Hand an output to the handler that iterates."""
        self._outputs.put_nowait(output)

    async def __aiter__(self) -> AsyncIterator[Output]:
        async for output in self.with_pauses(None):
            if output is not None:
                yield output

    async def with_pauses(self, seconds: float | None) -> AsyncIterator[Output | None]:
        """Iterate, with a None after every so many seconds in which nothing came."""
        while self._open:
            output = None
            try:
                async with asyncio.timeout(seconds):
                    output = await self._outputs.get()
            except TimeoutError:
                pass
            else:
                self._open -= output.finish is not None
            yield output


@dataclass(slots=True)
class InFlight:
    """A request that has been let in and has not ended."""

    request: GenerationRequest
    handle: RequestHandle
    first_output_at: float | None = None
    last_output_at: float = 0.0
