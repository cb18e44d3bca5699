"""Work beside the engine that clients take turns at: compiling grammars, encoding long texts.

One thread does it. Of the clients that wait, the one that has had the least of its time goes next;
a client that comes back after a while begins where the others are, so idling earns no credit (the
rule of `specops.engine.order`). Within a client's work the order is that of `Order.rank`: what is
short passes what is long, and nothing waits forever. What nobody waits for any more is not begun.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specops.engine.order import PATIENCE

MOST_ACCOUNTS = 4096
"""Clients whose time is remembered, and all that wait. Without keys each address is a client."""
_T = TypeVar("_T")


@dataclass(order=True, slots=True)
class _Work:
    rank: float
    number: int  # of those with the same rank the first one goes first
    do: Callable[[], Any] = field(compare=False)
    done: asyncio.Future[Any] = field(compare=False)


class ClientTurns:
    """A thread and those who wait for it. Used on one event loop.

    Args:
        name: of the thread.
        clock: returns seconds.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._clock = clock
        self._waiting: dict[str, list[_Work]] = {}  # heaps; only clients that wait are in it
        self._had: defaultdict[str, float] = defaultdict(float)  # seconds, by client
        self._least = 0.0  # no client that comes has had less
        self._busy = False
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Number of those who wait for their turn."""
        return sum(map(len, self._waiting.values()))

    async def run(
        self,
        client: str,
        work: Callable[[], _T],
        *,
        seconds: float = 0.0,
        stop: Callable[[], None] = lambda: None,
    ) -> _T:
        """Have the thread do work, and return its result. To leave, cancel the task that waits.

        Args:
            client: whose turn it takes.
            work: is called on the thread.
            seconds: about how long it takes.
            stop: called if the client leaves during the work. What goes on all the same counts
                against the client, and its result is dropped.
        """
        if client not in self._waiting:
            if len(self._had) >= MOST_ACCOUNTS:  # who does not wait begins where the others are
                self._had = defaultdict(float, {name: self._had[name] for name in self._waiting})
            self._had[client] = max(self._had[client], self._least)
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        rank = self._clock() + PATIENCE * seconds
        item = _Work(rank, next(self._numbers), work, done)
        heapq.heappush(self._waiting.setdefault(client, []), item)
        self._next()
        try:
            return await done
        except asyncio.CancelledError:
            if done.cancelled() and not self._drop(client, item):
                stop()  # it runs: what has its result runs no more, and another one does
            raise

    def _drop(self, client: str, item: _Work) -> bool:
        """Take work out of the queue; return whether it was there."""
        waiting = self._waiting.get(client, [])
        if item not in waiting:
            return False
        waiting.remove(item)
        heapq.heapify(waiting)
        if not waiting:
            del self._waiting[client]
        return True

    def _next(self) -> None:
        if self._busy or not self._waiting:
            return
        client = min(self._waiting, key=lambda name: (self._had[name], self._waiting[name][0]))
        item = heapq.heappop(self._waiting[client])
        if not self._waiting[client]:
            del self._waiting[client]
        self._busy, self._least, begun = True, self._had[client], self._clock()
        running = asyncio.get_running_loop().run_in_executor(self._thread, item.do)

        def finished(result: asyncio.Future[Any]) -> None:
            self._busy = False
            self._had[client] += self._clock() - begun
            error = result.exception()
            if not item.done.done():
                if error is None:
                    item.done.set_result(result.result())
                else:
                    item.done.set_exception(error)
            self._next()

        running.add_done_callback(finished)
