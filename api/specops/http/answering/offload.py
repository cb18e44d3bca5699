"""Threads for work that would hold up the event loop: texts, templates, large bodies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from specops.http.errors import too_late, unavailable
from specops.http.state import Context

_T = TypeVar("_T")

# Encoding takes a third of a microsecond per character: the event loop can wait for so many.
_LONG_TEXT = 4096
# One thread: long prompts wait for each other, and the engine keeps its cores.
_ENCODER = ThreadPoolExecutor(1, "encode")
# Chat templates come from strangers, and may take a second for a short text. This thread waits for
# the process that renders them.
_RENDERER = ThreadPoolExecutor(1, "render")
# Texts of requests that hold no place in the queue. Each is kept, with its body, until a thread
# takes it, and chats wait behind it: a text of 1 MiB takes a third of a second.
_MOST_ASIDE = 8
_aside = threading.BoundedSemaphore(_MOST_ASIDE)


async def run_off_loop(
    ctx: Context, work: Callable[[], _T], size: int, *, renders: bool = False
) -> _T:
    """Do work that takes time in proportion to a text; on a thread if that may be long.

    Args:
        size: number of characters.
        renders: a chat template takes part.

    Raises:
        ApiError: the work took too long.
    """
    if size < _LONG_TEXT and not renders:
        return work()
    thread = _RENDERER if size < _LONG_TEXT else _ENCODER
    try:
        async with asyncio.timeout(ctx.settings.request_timeout):
            return await asyncio.get_running_loop().run_in_executor(thread, work)
    except TimeoutError:
        raise too_late("encoded", ctx.settings.request_timeout) from None


async def run_aside(
    ctx: Context, work: Callable[[], _T], size: int, *, renders: bool = False
) -> _T:
    """Do work in proportion to a text for a request that holds no place in the queue.

    Raises:
        ApiError: the work took too long, or too many such requests wait already.
    """
    if not _aside.acquire(blocking=False):
        raise unavailable("too many texts are being encoded or decoded; try again", "texts")
    try:
        return await run_off_loop(ctx, work, size, renders=renders)
    finally:
        _aside.release()
