"""The request queue: requests that wait for a slot, by the order that prompts in slots follow, too.

Each client has a heap, so a request comes and goes in logarithmic time. What is known of a prompt's
beginning changes while it waits, and its rank with it. So the first one's rank is computed anew
before it gets a slot, and a few others' in turn whenever a slot is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from specops.engine.order import Order
from specops.engine.request_state import RequestState

_RENEWED = 8  # ranks that are computed anew after each slot that is given
_SPARE = 64  # outdated entries that heaps may hold, plus as many as wait


class RequestQueue:
    """Requests that wait for a slot.

    Attributes:
        order: who goes first.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self._ranks: dict[RequestState, tuple[float, int]] = {}  # with the number of its arrival
        # By client. An entry whose rank is not the request's is outdated.
        self._heaps: dict[str, list[tuple[float, int, RequestState]]] = {}
        self._round: deque[RequestState] = deque()  # whose rank is renewed next
        self._numbers = count()
        self._outdated = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[RequestState]:
        """All that wait, in no particular order."""
        return iter(self._ranks)

    def add(self, state: RequestState) -> None:
        """Add a request that has arrived."""
        self.order.arrive(state.request.client, filter(self._top, list(self._heaps)))
        self._rank(state)
        self._round.append(state)

    def first(self) -> RequestState:
        """The request that gets the next slot.

        Raises:
            IndexError: the queue is empty.
        """
        while True:
            tops = {name: top for name in list(self._heaps) if (top := self._top(name))}
            if not tops:
                raise IndexError("the queue is empty")
            ahead = self.order.ahead({name: self.order.account(name) for name in tops})
            *_, state = min(top for name, top in tops.items() if name not in ahead)
            if not self._rank(state, worse=True):
                return state

    def take(self, state: RequestState) -> None:
        """Remove the first request, which got a slot, and charge its client's account for it."""
        self.remove(state)
        self.order.admitted(state)
        for _ in range(min(_RENEWED, len(self._round))):
            other = self._round.popleft()
            if other in self._ranks:
                self._rank(other)
                self._round.append(other)

    def remove(self, state: RequestState) -> bool:
        """Remove a request that has left; False if it does not wait."""
        if self._ranks.pop(state, None) is None:
            return False
        self._outdated += 1
        if self._outdated > len(self._ranks) + _SPARE:
            self._round = deque(self._ranks)
            for heap in self._heaps.values():
                heap[:] = filter(self._valid, heap)
                heapify(heap)
            self._outdated = 0
        return True

    def _rank(self, state: RequestState, *, worse: bool = False) -> bool:
        """Compute a request's rank anew; `worse`: keep one that became better.

        Returns:
            Whether the rank changed.
        """
        rank, before = self.order.rank(state), self._ranks.get(state)
        if before is not None and (rank == before[0] or (worse and rank < before[0])):
            return False
        self._outdated += before is not None
        number = next(self._numbers) if before is None else before[1]
        self._ranks[state] = rank, number
        heappush(self._heaps.setdefault(state.request.client, []), (rank, number, state))
        return True

    def _valid(self, entry: tuple[float, int, RequestState]) -> bool:
        return self._ranks.get(entry[2]) == entry[:2]

    def _top(self, client: str) -> tuple[float, int, RequestState] | None:
        """A client's first entry; a client without one is forgotten."""
        heap = self._heaps[client]
        while heap and not self._valid(heap[0]):
            heappop(heap)
            self._outdated -= 1
        if not heap:
            del self._heaps[client]
            return None
        return heap[0]
