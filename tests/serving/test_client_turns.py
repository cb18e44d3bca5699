"""Clients take turns at a thread; who leaves is dropped, and short work passes long work."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from specops.serving import client_turns
from specops.serving.client_turns import ClientTurns
from tests.waiting import PATIENCE

pytestmark = pytest.mark.anyio


class Thread:
    """Work whose order is noted, on a clock that each piece of work puts forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.begun, self.may = threading.Event(), threading.Event()
        self.turns = ClientTurns("turns", clock=lambda: self.now)

    def work(self, name: str, seconds: float = 1.0) -> Callable[[], str]:
        def do() -> str:
            self.now += seconds
            self.done.append(name)
            return name

        return do

    def wait(self) -> None:
        self.begun.set()
        assert self.may.wait(PATIENCE)

    async def busy(self, client: str = "first") -> asyncio.Task[None]:
        """Have the thread do something until `may` is set."""
        task = asyncio.create_task(self.turns.run(client, self.wait))
        await asyncio.to_thread(self.begun.wait, PATIENCE)
        return task

    async def ask(self, client: str, name: str, seconds: float = 1.0) -> asyncio.Task[str]:
        work = self.turns.run(client, self.work(name, seconds), seconds=seconds)
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        return task


async def test_clients_take_turns_by_the_time_that_each_had() -> None:
    thread = Thread()
    first = await thread.busy("other")
    tasks = [await thread.ask("many", f"many {number}", 2.0) for number in range(3)]
    tasks += [await thread.ask("few", f"few {number}") for number in range(3)]
    thread.may.set()
    await asyncio.gather(first, *tasks)
    assert thread.done == ["few 0", "many 0", "few 1", "few 2", "many 1", "many 2"]


async def test_a_client_that_was_away_has_no_credit() -> None:
    thread = Thread()
    await (await thread.ask("new", "new before", 1.0))
    for number in range(5):
        await (await thread.ask("old", f"old {number}", 10.0))
    first = await thread.busy("old")
    tasks = [await thread.ask("new", f"new {number}", 10.0) for number in range(2)]
    tasks += [await thread.ask("old", "old again", 10.0)]
    thread.may.set()
    await asyncio.gather(first, *tasks)
    assert thread.done[-3:] == ["new 0", "old again", "new 1"]


async def test_of_a_crowd_of_addresses_only_a_few_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_turns, "MAX_ACCOUNTS", 4)
    thread = Thread()
    for number in range(20):
        await (await thread.ask(str(number), f"before {number}"))
        assert len(thread.turns._had) <= 4
    await (await thread.ask("many", "many 0", 10.0))
    first = await thread.busy()
    tasks = [await thread.ask(name, name) for name in ("many", *map(str, range(9)))]
    thread.may.set()
    await asyncio.gather(first, *tasks)
    assert thread.done[-1] == "many"  # its account was kept while it waited


async def test_short_work_passes_long_work_of_the_same_client_which_goes_on_all_the_same() -> None:
    thread = Thread()
    first = await thread.busy()
    tasks = [await thread.ask("one", "long", 2.0), await thread.ask("one", "short", 0.1)]
    thread.now += 100.0
    tasks.append(await thread.ask("one", "too late to pass", 0.1))
    thread.may.set()
    await asyncio.gather(first, *tasks)
    assert thread.done == ["short", "long", "too late to pass"]


async def test_who_leaves_is_dropped_before_the_turn_and_stopped_in_it() -> None:
    thread = Thread()
    stopped = []
    waiting = thread.turns.run("one", thread.wait, stop=lambda: stopped.append("one"))
    running = asyncio.create_task(waiting)
    await asyncio.to_thread(thread.begun.wait, PATIENCE)
    leaving, staying = await thread.ask("two", "leaving"), await thread.ask("two", "staying")
    assert len(thread.turns) == 2
    for task in (leaving, running):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (stopped, len(thread.turns)) == (["one"], 1)
    thread.may.set()
    assert await staying == "staying"
    assert thread.done == ["staying"]


async def test_who_leaves_with_the_result_stops_nobody_else() -> None:
    thread = Thread()
    stopped: list[str] = []

    async def asking() -> None:
        await thread.turns.run("one", thread.work("one"), stop=lambda: stopped.append("one"))

    first = await thread.busy()
    leaving = asyncio.create_task(asking())
    await asyncio.sleep(0)
    other = await thread.ask("two", "other")
    real = thread.turns._next

    def next_and_leave() -> None:
        real()
        if thread.done == ["one"]:
            leaving.cancel()

    thread.turns._next = next_and_leave  # type: ignore[method-assign]
    thread.may.set()
    await first
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await other == "other"
    assert stopped == []


async def test_an_error_reaches_the_one_that_it_belongs_to() -> None:
    thread = Thread()

    def fail() -> None:
        raise KeyError("mine")

    first = await thread.busy()
    failing = asyncio.create_task(thread.turns.run("one", fail))
    left = asyncio.create_task(thread.turns.run("two", fail))
    await asyncio.sleep(0)
    left.cancel()
    other = await thread.ask("one", "other")
    thread.may.set()
    await first
    with pytest.raises(KeyError, match="mine"):
        await failing
    assert await other == "other"
