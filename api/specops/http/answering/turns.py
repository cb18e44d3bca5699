"""Work on a thread that clients take turns at, for as long as the client waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from specops.http.errors import client_left
from specops.http.sse import calling_on_disconnect
from specops.http.state import Context
from specops.serving.client_turns import ClientTurns

_T = TypeVar("_T")


async def in_turn(
    ctx: Context,
    turns: ClientTurns,
    work: Callable[[], _T],
    *,
    seconds: float = 0.0,
    stop: Callable[[], None] = lambda: None,
) -> _T:
    """Have a thread work for a request whose body has been read, in its client's turn.

    Args:
        ctx: of the HTTP request.
        turns: the clients that wait for the thread.
        work: what is to be done.
        seconds, stop: see `ClientTurns.run`.

    Raises:
        ApiError: the client has left.
    """

    def leave() -> None:
        task.cancel()

    task = asyncio.ensure_future(turns.run(ctx.whose, work, seconds=seconds, stop=stop))
    async with calling_on_disconnect(ctx.receive, leave):
        try:
            return await task
        except asyncio.CancelledError:
            if (own := asyncio.current_task()) is not None and own.cancelling():
                raise  # a time limit of the request, or the server's end
            raise client_left() from None
