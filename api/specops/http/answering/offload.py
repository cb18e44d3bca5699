"""Work that would hold up the event loop goes to threads, where clients take turns.

Texts, templates and large bodies take time in proportion to their length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from specops.http.answering.turns import in_turn
from specops.http.errors import timeout_error, unavailable
from specops.http.security.request_body import LARGE_BODY_BYTES, MAX_BODY_BYTES
from specops.http.state import Context

_T = TypeVar("_T")

# Encoding takes a third of a microsecond per character: the event loop can wait for so many.
_LONG_TEXT = 4096
_CHARACTER_SECONDS = 3.3e-7
# Bytes of bodies that wait and hold no place in the queue, and those of one client. The least that
# a body counts bounds how many there are.
_MAX_ASIDE, _MAX_ASIDE_EACH, _MIN_ASIDE = 8 * MAX_BODY_BYTES, 4 * MAX_BODY_BYTES, 1 << 16


async def run_off_loop(
    ctx: Context, work: Callable[[], _T], size: int, *, renders: bool = False
) -> _T:
    """Do work that takes time in proportion to a text; on a thread if that may be long.

    Args:
        ctx: of the HTTP request.
        work: what is to be done; it sees no event loop.
        size: number of characters.
        renders: a chat template takes part.

    Raises:
        ApiError: the work took too long, or the client left.
    """
    if size < _LONG_TEXT and not renders:
        return work()
    if size < _LONG_TEXT:  # a template may take a second all the same
        turns = ctx.app.executors.rendering
    else:  # a short text passes those that take a second
        threads = ctx.app.executors
        turns = threads.encoding if size <= LARGE_BODY_BYTES else threads.encoding_long
    limit = ctx.settings.request_timeout
    try:
        async with asyncio.timeout(limit):
            return await in_turn(ctx, turns, work, seconds=size * _CHARACTER_SECONDS)
    except TimeoutError:
        raise timeout_error("encoded", limit) from None


async def run_limited(
    ctx: Context, work: Callable[[], _T], size: int, *, renders: bool = False
) -> _T:
    """Do work in proportion to a text for a request that holds no place in the queue.

    Args:
        ctx: of the HTTP request.
        work: see `run_off_loop`.
        size: number of characters.
        renders: a chat template takes part.

    Raises:
        ApiError: the work took too long, the client left, or too many such requests wait already.
    """
    waiting, own = ctx.app.aside, max(ctx.body_bytes, _MIN_ASIDE)
    waiting[ctx.whose] += own
    try:
        if waiting[ctx.whose] > _MAX_ASIDE_EACH or waiting.total() > _MAX_ASIDE:
            raise unavailable("too many texts are being encoded or decoded; try again", "texts")
        return await run_off_loop(ctx, work, size, renders=renders)
    finally:
        waiting[ctx.whose] -= own
        if not waiting[ctx.whose]:
            del waiting[ctx.whose]
