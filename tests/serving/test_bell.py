"""The bell: a thread has the event loop call a function, and keeps the interpreter meanwhile."""

import asyncio
import sys
import threading

import pytest

from specops.serving.bell import Bell
from tests.waiting import PATIENCE

pytestmark = pytest.mark.anyio


async def test_a_thread_rings_and_the_event_loop_calls() -> None:
    called, threads = asyncio.Event(), list[int]()

    def call() -> None:
        threads.append(threading.get_ident())
        called.set()

    bell = Bell(asyncio.get_running_loop(), call)
    try:
        for _ in range(3):
            await asyncio.to_thread(bell.ring)
            await asyncio.wait_for(called.wait(), PATIENCE)
            called.clear()
    finally:
        bell.close()
    assert threads == [threading.get_ident()] * 3


async def test_many_rings_may_be_one_call_and_fill_nothing() -> None:
    """More than a pipe holds: a ring that finds it full is one of those that wait already."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    bell = Bell(asyncio.get_running_loop(), call)
    try:
        for _ in range(1 << 17):
            bell.ring()
        while not calls:
            await asyncio.sleep(0)
    finally:
        bell.close()


async def test_a_ring_keeps_the_interpreter() -> None:
    """Another thread that waits for it gets no turn, however often the bell rings."""
    turns, ends, gate = 0, False, threading.Lock()

    def wait_for_turns() -> None:
        nonlocal turns
        with gate:  # until then it does not ask for the interpreter
            pass
        while not ends:
            turns += 1

    bell = Bell(asyncio.get_running_loop(), lambda: None)
    interval = sys.getswitchinterval()
    other = threading.Thread(target=wait_for_turns)
    try:
        with gate:
            other.start()
            sys.setswitchinterval(3600)  # a thread runs until it gives up the interpreter
        for _ in range(20_000):
            bell.ring()
        found = turns
    finally:
        sys.setswitchinterval(interval)
        ends = True
        other.join()
        bell.close()
    assert found == 0
