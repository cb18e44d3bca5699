"""The request queue: requests that wait for a slot, by the order that prompts in slots follow, too.

What is known of a prompt's beginning changes while it waits, and its rank with it. So the first
one's rank is computed anew before it gets a slot, and a few others' in turn whenever a slot is
given: to compute a rank takes far longer than to compare all of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import count

from specops.engine.order import Order
from specops.engine.request_state import RequestState

_RENEWED = 8  # ranks that are computed anew after each slot that is given


class RequestQueue:
    """Requests that wait for a slot.

    Attributes:
        order: who goes first.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        # With the number of its arrival. The first one's rank is renewed next.
        self._ranks: OrderedDict[RequestState, tuple[float, int]] = OrderedDict()
        self._clients: Counter[str] = Counter()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[RequestState]:
        """All that wait, in no particular order."""
        return iter(self._ranks)

    def add(self, state: RequestState) -> None:
        """Add a request that has arrived."""
        self.order.arrive(state.request.client, self._clients)
        self._clients[state.request.client] += 1
        self._ranks[state] = self.order.rank(state), next(self._numbers)

    def first(self) -> RequestState:
        """The request that gets the next slot.

        Raises:
            IndexError: the queue is empty.
        """
        if not self._ranks:
            raise IndexError("the queue is empty")
        ahead = self.order.ahead({name: self.order.account(name) for name in self._clients})
        waiting = [state for state in self._ranks if state.request.client not in ahead]
        while True:
            state = min(waiting, key=self._ranks.__getitem__)
            if not self._renew(state, worse=True):
                return state

    def take(self, state: RequestState) -> None:
        """Remove the first request, which got a slot, and charge its client's account for it."""
        self.remove(state)
        self.order.admitted(state)
        for _ in range(min(_RENEWED, len(self._ranks))):
            other = next(iter(self._ranks))
            self._renew(other)
            self._ranks.move_to_end(other)

    def remove(self, state: RequestState) -> bool:
        """Remove a request that has left; False if it does not wait."""
        if self._ranks.pop(state, None) is None:
            return False
        self._clients -= Counter([state.request.client])  # forgets a client without any
        return True

    def _renew(self, state: RequestState, *, worse: bool = False) -> bool:
        """Compute a request's rank anew; `worse`: keep one that became better.

        Returns:
            Whether the rank changed.
        """
        rank, (before, number) = self.order.rank(state), self._ranks[state]
        if rank == before or (worse and rank < before):
            return False
        self._ranks[state] = rank, number
        return True
