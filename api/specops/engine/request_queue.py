"""The request queue: in which order waiting requests get slots.

First come, first served is fair between requests. Where one client sends many requests and others
few, shares per client are fairer: the client that has had the least goes first. That is start-time
fair queueing with tokens for packets (Goyal, Vin and Cheng, SIGCOMM 1996; for language models:
Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). No request starves in either
order: each token that a client gets moves it back, and waiting moves no other client ahead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from specops.engine.request_state import RequestState

_GENERATED = 2.0  # a generated token counts as two prompt tokens: at best slots share its pass


class RequestQueue(Protocol):
    """Requests that wait for a slot."""

    def __len__(self) -> int:
        """Number of waiting requests."""

    def __iter__(self) -> Iterator[RequestState]:
        """All that wait, in no particular order."""

    def add(self, state: RequestState) -> None:
        """Let a request wait."""

    def next(self) -> RequestState:
        """Take out the request that gets the next slot.

        Raises:
            IndexError: the queue is empty.
        """

    def remove(self, state: RequestState) -> bool:
        """Take out a request that has left, in constant time; False where it does not wait."""

    def generated(self, client: str, tokens: int) -> None:
        """A client got so many new tokens."""


class FirstComeFirstServed:
    """Requests get slots in the order in which they came."""

    def __init__(self) -> None:
        self._states: OrderedDict[RequestState, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def add(self, state: RequestState) -> None:
        """Go to the end."""
        self._states[state] = None

    def next(self) -> RequestState:
        """Take out the oldest; see `RequestQueue.next`."""
        if not self._states:
            raise IndexError("the queue is empty")
        return self._states.popitem(last=False)[0]

    def remove(self, state: RequestState) -> bool:
        """Take out one that has left; see `RequestQueue.remove`."""
        return self._states.pop(state, state) is None

    def generated(self, client: str, tokens: int) -> None:
        """Nothing: all clients are alike."""


class FairShares:
    """Equal shares for all clients with waiting requests; within a client first come, first served.

    A client's account is the number of tokens that it got; the lowest account goes first. A client
    that comes back starts at the account that was served last: waiting saves nothing up.
    """

    def __init__(self) -> None:
        self._queues: dict[str, OrderedDict[RequestState, None]] = {}
        self._accounts: dict[str, float] = {}  # only those above the last served
        self._last_served = 0.0

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[RequestState]:
        for queue in self._queues.values():
            yield from queue

    def add(self, state: RequestState) -> None:
        """Go to the end of the client's own queue."""
        client = state.request.client
        if not self._queues:  # no request had to wait: no client took anything from another
            self._last_served = max(self._accounts.values(), default=self._last_served)
            self._accounts.clear()
        if client not in self._queues:
            self._queues[client] = OrderedDict()
            self._accounts[client] = self._account(client)
        self._queues[client][state] = None

    def next(self) -> RequestState:
        """Take out the first request of the client with the lowest account."""
        if not self._queues:
            raise IndexError("the queue is empty")
        client = min(self._queues, key=self._order)
        self._last_served = self._accounts[client]
        state = next(iter(self._queues[client]))
        self.remove(state)
        self._charge(client, sum(map(len, state.request.prompts)))
        self._forget()
        return state

    def remove(self, state: RequestState) -> bool:
        """Take out one that has left; see `RequestQueue.remove`."""
        client = state.request.client
        queue = self._queues.get(client)
        if queue is None or queue.pop(state, state) is not None:
            return False
        if not queue:
            del self._queues[client]
        return True

    def generated(self, client: str, tokens: int) -> None:
        """Charge a client's account."""
        self._charge(client, _GENERATED * tokens)

    def _order(self, client: str) -> tuple[float, float]:
        return self._accounts[client], next(iter(self._queues[client])).request.arrival

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
