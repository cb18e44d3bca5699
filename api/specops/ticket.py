"""A request's place as its handler on the event loop sees it: outputs come, and it can be given
up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from specops.places import Place
from specops.request import GenerationRequest, Output


class Ticket:
    """The place of one or several requests. Iterate over it for their outputs, once.

    Ends with the output of the last of them that has `finish` set.

    Args:
        requests: whose outputs it is for.
        place: of the first of them.
        cancel: gives the places up; does nothing for a request that has ended.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        place: Place,
        cancel: Callable[[], None],
    ) -> None:
        self.requests = tuple(requests)
        self.place = place
        self._cancel = cancel
        self._open = len(requests)
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    def cancel(self) -> None:
        """Give the places up; does nothing where all requests have ended."""
        self._cancel()

    def deliver(self, output: Output) -> None:
        """Hand an output to whoever iterates."""
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
    ticket: Ticket
    first_output_at: float | None = None
    last_output_at: float = 0.0
