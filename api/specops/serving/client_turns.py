"""Work outside the engine that clients take turns at: compiling grammars, encoding long texts.

One thread does it. Of the clients that wait, the one that has had the least of its time goes next;
a client that comes back after a while begins where the others are, so idling earns no credit (the
rule of `specops.engine.order`). Within a client's work the order is that of `Order.rank`: what is
short passes what is long, and nothing waits forever. What nobody waits for any more is not begun.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from specops.engine.order import PATIENCE

MAX_ACCOUNTS = 4096
"""Clients whose time is remembered, and all that wait. Without keys each address is a client."""
_T = TypeVar("_T")


@dataclass(eq=False, slots=True)
class _Work:
    client: str
    rank: float
    do: Callable[[], Any]
    done: asyncio.Future[Any]


class ClientTurns:
    """A thread and its waiting clients. Used on one event loop.

    Args:
        name: of the thread.
        clock: returns seconds.
    """

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._clock = clock
        self._waiting: list[_Work] = []  # as it came; admission bounds how much there is
        self._had: defaultdict[str, float] = defaultdict(float)  # seconds, by client
        self._least = 0.0  # no client that comes has had less
        self._busy = False

    def __len__(self) -> int:
        """Number of clients that wait for their turn."""
        return len(self._waiting)

    def shut_down(self) -> None:
        """End the thread after its current work."""
        self._thread.shutdown(wait=False, cancel_futures=True)

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
        waiting = {item.client for item in self._waiting}
        if client not in waiting:
            if len(self._had) >= MAX_ACCOUNTS:  # who does not wait begins where the others are
                self._had = defaultdict(float, {name: self._had[name] for name in waiting})
            self._had[client] = max(self._had[client], self._least)
        done: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        item = _Work(client, self._clock() + PATIENCE * seconds, work, done)
        self._waiting.append(item)
        self._next()
        try:
            return await done
        except asyncio.CancelledError:
            if item in self._waiting:
                self._waiting.remove(item)
            elif done.cancelled():
                stop()  # finished work is not running: the thread may do other work
            raise

    def _next(self) -> None:
        if self._busy or not self._waiting:
            return
        item = min(self._waiting, key=lambda item: (self._had[item.client], item.rank))
        self._waiting.remove(item)
        self._busy, self._least, begun = True, self._had[item.client], self._clock()
        running = asyncio.get_running_loop().run_in_executor(self._thread, item.do)

        def finished(result: asyncio.Future[Any]) -> None:
            self._busy = False
            self._had[item.client] += self._clock() - begun
            error = result.exception()
            if not item.done.done():
                if error is None:
                    item.done.set_result(result.result())
                else:
                    item.done.set_exception(error)
            self._next()

        running.add_done_callback(finished)
