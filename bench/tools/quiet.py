"""Makes sure that a process that is not being timed leaves the cores alone.

After a forward pass the threads of ONNX Runtime's pool spin in wait for the next one: about 90 ms
with onnxruntime 1.31. On two cores that slows down the process that runs next, so a timed run
begins when all sides are seen to be idle, and the CPU time that an idle side took is reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from bench.tools.stats import Summary, rotated

_WINDOW_SECONDS = 0.03
_QUIET_SHARE = 0.1  # of one core: a spinning thread takes all of one
_TIMEOUT_SECONDS = 10.0
_NANOSECONDS = 1e9
_UNSURE_SECONDS = 0.02  # what the kernel's count for the whole machine may be off
_STRANGERS = 0.2  # of a core: what others may take meanwhile; the system's own is less
_ATTEMPTS = 20
_SELDOM = 3  # rounds


class Process(Protocol):
    """Something that computes in a process of its own."""

    @property
    def pid(self) -> int:
        """The process's id."""


class Case(Protocol):
    """One kind of pass. A seldom one, which takes long, is part of every third round."""

    @property
    def title(self) -> str:
        """Its name."""

    @property
    def seldom(self) -> bool:
        """Whether it takes long."""


Times = dict[str, dict[str, list[float]]]
"""Milliseconds, round by round, by case and side."""
Side = TypeVar("Side", bound=Process)
Timed = TypeVar("Timed", bound=Case)
Found = TypeVar("Found")


class DisturbedError(RuntimeError):
    """The machine was never ours alone."""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process's living threads, in seconds, to the scheduler's precision."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
        except (FileNotFoundError, ProcessLookupError):
            if not Path(f"/proc/{pid}/schedstat").is_file():
                raise
            # The thread ended between being listed and being read.
    return total / _NANOSECONDS


def main_thread_seconds(pid: int) -> float:
    """CPU time of a process's first thread, in seconds; in a server that is its event loop."""
    schedstat = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii")
    return int(schedstat.split()[0]) / _NANOSECONDS


def machine_seconds(stat: Path = Path("/proc/stat")) -> float:
    """CPU time that all of this machine has taken together, in seconds, to 10 ms a core.

    Time that a hypervisor gave to others counts too: it is missing here as well.
    """
    line = stat.read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Watched:
    """A stretch of time: how long it was, and the CPU seconds that each process took.

    `others` is the share of a core that all other processes of the machine took.
    """

    seconds: float = 0.0
    taken: dict[int, float] = field(default_factory=dict)
    others: float = 0.0


@contextmanager
def watched(*pids: int) -> Iterator[Watched]:
    """Watch processes as long as the context lasts; its value is filled in at the end."""
    found = Watched()
    before = {pid: cpu_seconds(pid) for pid in pids}
    machine, start = machine_seconds(), time.monotonic()
    yield found
    found.seconds = time.monotonic() - start
    found.taken = {pid: cpu_seconds(pid) - before[pid] for pid in pids}
    others = machine_seconds() - machine - sum(found.taken.values()) - _UNSURE_SECONDS
    found.others = max(others, 0.0) / found.seconds


def settle(*pids: int, timeout: float = _TIMEOUT_SECONDS, window: float = _WINDOW_SECONDS) -> None:
    """Wait until this process and the given ones have stopped spinning, for a window of time."""
    watching = (os.getpid(), *pids)
    deadline = time.monotonic() + timeout
    while True:
        start, before = time.monotonic(), [cpu_seconds(pid) for pid in watching]
        time.sleep(window)  # the window over which CPU time is compared
        passed = time.monotonic() - start
        after = [cpu_seconds(pid) for pid in watching]
        busy = [
            pid
            for pid, old, new in zip(watching, before, after, strict=True)
            if (new - old) / passed > _QUIET_SHARE
        ]
        if not busy:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {busy} are still busy after {timeout:g} s")


@dataclass(slots=True)
class Turns:
    """Lets processes compute one after the other, each while all others are idle, in rounds.

    Attributes:
        strangers: share of a core that the rest of the machine may take.
        idle: most that a process took that had to be idle.
        others: most that the rest of the machine took in a round that counts.
        disturbed: rounds that were run again, because others computed.
    """

    strangers: float = _STRANGERS
    idle: float = 0.0
    others: float = 0.0
    disturbed: int = 0

    def round(
        self, sides: Mapping[str, Side], number: int, ask: Callable[[Side], Found]
    ) -> dict[str, Found]:
        """Have each side compute and return what it brought; which is first turns with `number`.

        Raises:
            DisturbedError: others computed in every attempt.
        """
        pids = [side.pid for side in sides.values()]
        for _ in range(_ATTEMPTS):
            found: dict[str, Found] = {}
            others = 0.0
            for name in rotated(list(sides), number):
                settle(*pids)
                with watched(os.getpid(), *pids) as seen:
                    found[name] = ask(sides[name])
                taken = [seen.taken[pid] for pid in pids if pid != sides[name].pid]
                self.idle = max(self.idle, max(taken, default=0.0) / seen.seconds)
                others = max(others, seen.others)
            if others <= self.strangers:
                self.others = max(self.others, others)
                return found
            self.disturbed += 1
        raise DisturbedError(f"others compute here, again and again: {others:.0%} of a core")

    def measure(
        self,
        sides: Mapping[str, Side],
        cases: Sequence[Timed],
        rounds: int,
        ask: Callable[[Timed, Side], Sequence[float]],
        times: Times,
    ) -> None:
        """Add rounds to `times`; `ask` returns seconds of passes, whose median counts.

        A round before the first is not counted: what it allocates, the later ones have.
        """
        for number in range(-1, rounds):
            for case in cases:
                if case.seldom and max(number, 0) % _SELDOM:
                    continue
                found = self.round(sides, number, partial(ask, case))
                for name, seconds in found.items() if number >= 0 else ():
                    told = times.setdefault(case.title, {}).setdefault(name, [])
                    told.append(1000 * Summary.of(seconds).median)

    @property
    def told(self) -> str:
        """A note on it."""
        return (
            f"sides in turns: an idle one took at most {self.idle:.1%} of a core, others "
            f"{self.others:.0%}; {self.disturbed} rounds were run again because others computed"
        )
