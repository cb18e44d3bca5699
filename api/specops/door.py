"""Who gets in: a place for each request, as long as the queue and memory have one.

`places` counts who is in and says how long that takes, `admission` watches memory. Whoever is
turned away hears it before anything is computed for them, with the time to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specops.admission import MemoryGate, Shed
from specops.places import Place, Places
from specops.request import FinishReason, GenerationRequest, GenerationStats

_FULL = {
    None: "the queue is full",
    Shed.KV_TOKENS: "the requests before this one will fill the KV cache many times over",
    Shed.MEMORY: "memory is running out",
    Shed.PRESSURE: "the machine waits for memory most of the time",
}


class QueueFull(Exception):  # noqa: N818 - a state, not a fault
    """All places are taken, or memory is. `retry_after` is the expected wait, in seconds."""

    def __init__(self, retry_after: int, shed: Shed | None = None) -> None:
        super().__init__(f"{_FULL[shed]}; try again in {retry_after} s")
        self.retry_after = retry_after
        self.reason = "queue_full" if shed is None else shed.value


class Door:
    """Lets requests in, and out again. Used on the event loop.

    Args:
        places: in the slots and in the queue.
        gate: what memory says.
        refused: told the reason of each refusal.
    """

    def __init__(self, places: Places, gate: MemoryGate, refused: Callable[[str], None]) -> None:
        self._places = places
        self._gate = gate
        self._refused = refused
        self._reserved = 0  # places of requests that are not read yet

    def check(self, count: int, tokens: int = 0) -> None:
        """Refuse whom there is no room for.

        Args:
            count: requests that want in together.
            tokens: that they may take; 0 where that is not known yet.

        Raises:
            QueueFull: the slots and the places of the queue are taken, or memory is.
        """
        places, shed = self._places, None
        full = places.taken + self._reserved + count > places.count
        if not full:
            shed = self._gate.refusal(
                promised_tokens=places.tokens, tokens=tokens, in_flight=places.taken
            )
        if full or shed is not None:
            refusal = QueueFull(places.retry_after, shed)
            self._refused(refusal.reason)
            raise refusal

    def reserve(self) -> Callable[[], None]:
        """Keep a place for a request that has not been read yet.

        Returns:
            Gives the place up, for good or to be taken by `enter`; idempotent.

        Raises:
            QueueFull: see `check`.
        """
        self.check(1)
        kept = True
        self._reserved += 1

        def release() -> None:
            nonlocal kept
            self._reserved -= kept
            kept = False

        return release

    def enter(self, requests: Sequence[GenerationRequest]) -> Place:
        """Let requests in, all or none.

        Returns:
            The place of the first.

        Raises:
            QueueFull: see `check`.
        """
        self.check(len(requests), sum(request.tokens for request in requests))
        return self._places.enter(requests)

    def leave(self, request_id: str, reason: FinishReason, stats: GenerationStats | None) -> None:
        """Free a request's place, and learn from what it took how long the others will wait."""
        self._places.leave(request_id)
        if stats is not None:
            self._places.learn(reason, stats)
