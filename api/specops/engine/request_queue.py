"""The request queue: in which order waiting requests get slots.

First come, first served is fair between requests. But a suggestion for an editor is worth little
after a second, and a prompt that is only computed ahead can wait: a request's priority moves its
turn by a number of seconds. The turn is fixed on arrival, so no request starves.

Where one client sends many requests and others few, shares per client are fairer: the client that
has used the least goes first. That is start-time fair queueing with tokens for packets (Goyal, Vin
and Cheng, SIGCOMM 1996; for language models: Sheng et al., Fairness in Serving Large Language
Models, OSDI 2024). No request starves in either order: each token that a client gets moves it back,
and waiting moves no other client ahead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from specops.engine.request_state import RequestState

_GENERATED = 2.0  # prompt tokens that a generated token counts as: at best slots share its pass


class RequestQueue:
    """Requests that wait for a slot: the earliest turn goes first.

    Args:
        by_client: clients with waiting requests get equal shares. A client's account is the number
            of tokens that it got; the lowest account goes first. A client that returns starts at
            the account that was served last: idling earns no credit. Otherwise all requests belong
            to one client.
    """

    def __init__(self, *, by_client: bool = False) -> None:
        self._by_client = by_client
        # By client and priority, in the order of arrival; none is empty.
        self._queues: dict[str, dict[int, OrderedDict[RequestState, None]]] = {}
        self._accounts: dict[str, float] = {}  # only those above the last served
        self._last_served = 0.0

    def __len__(self) -> int:
        return sum(len(queue) for queues in self._queues.values() for queue in queues.values())

    def __iter__(self) -> Iterator[RequestState]:
        """All that wait, in no particular order."""
        for queues in self._queues.values():
            for queue in queues.values():
                yield from queue

    def add(self, state: RequestState) -> None:
        """Append a request to its client's queue of this priority."""
        client = self._client(state)
        if not self._queues:  # no request had to wait: no client took anything from another
            self._last_served = max(self._accounts.values(), default=self._last_served)
            self._accounts.clear()
        if client not in self._queues:
            self._queues[client] = {}
            self._accounts[client] = self._account(client)
        self._queues[client].setdefault(state.request.priority, OrderedDict())[state] = None

    def first(self) -> RequestState:
        """The request that gets the next slot, of the client with the lowest account.

        Raises:
            IndexError: the queue is empty.
        """
        if not self._queues:
            raise IndexError("the queue is empty")
        return self._first(min(self._queues, key=self._order))

    def take(self, state: RequestState) -> None:
        """Remove the first request, which got a slot, and charge its client's account for it."""
        client = self._client(state)
        self._last_served = self._accounts[client]
        self.remove(state)
        self._charge(client, sum(map(len, state.request.prompts)))
        self._forget()

    def remove(self, state: RequestState) -> bool:
        """Remove a request that has left, in constant time; False if it does not wait."""
        client, priority = self._client(state), state.request.priority
        queues = self._queues.get(client, {})
        queue = queues.get(priority)
        if queue is None or queue.pop(state, state) is not None:
            return False
        if not queue:
            del queues[priority]
        if not queues:
            del self._queues[client]
        return True

    def generated(self, state: RequestState, tokens: int) -> None:
        """Charge the account of a request's client for new tokens, where there are accounts."""
        if self._by_client:
            self._charge(state.request.client, _GENERATED * tokens)

    def _client(self, state: RequestState) -> str:
        return state.request.client if self._by_client else ""

    def _order(self, client: str) -> tuple[float, float]:
        return self._accounts[client], self._first(client).request.turn

    def _first(self, client: str) -> RequestState:
        first = (next(iter(queue)) for queue in self._queues[client].values())
        return min(first, key=lambda state: state.request.turn)

    def _account(self, client: str) -> float:
        return max(self._accounts.get(client, 0.0), self._last_served)

    def _charge(self, client: str, tokens: float) -> None:
        self._accounts[client] = self._account(client) + tokens

    def _forget(self) -> None:
        """Drop the accounts at or below the last served: a new one would be the same."""
        self._accounts = {
            client: account
            for client, account in self._accounts.items()
            if account > self._last_served or client in self._queues
        }
