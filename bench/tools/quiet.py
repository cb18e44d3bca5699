"""Makes sure that a process that is not being timed leaves the cores alone.

After a forward pass the threads of ONNX Runtime's pool spin in wait for the next one: about 90 ms
with onnxruntime 1.31. On two cores that slows down the process that runs next, so a timed run
begins when all sides are seen to be idle, and the CPU time that an idle side took is reported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_WINDOW_SECONDS = 0.03
_QUIET_SHARE = 0.1  # of one core: a spinning thread takes all of one
_TIMEOUT_SECONDS = 10.0
_NANOSECONDS = 1e9
_UNSURE_SECONDS = 0.02  # what the kernel's count for the whole machine may be off


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


def settle(*pids: int, timeout: float = _TIMEOUT_SECONDS) -> None:
    """Wait until this process and the given ones have stopped spinning."""
    watching = (os.getpid(), *pids)
    deadline = time.monotonic() + timeout
    while True:
        start, before = time.monotonic(), [cpu_seconds(pid) for pid in watching]
        time.sleep(_WINDOW_SECONDS)  # the window over which CPU time is compared
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
