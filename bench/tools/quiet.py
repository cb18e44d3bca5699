"""Times processes in turns and ensures that only one of them computes at a time.

After a forward pass, the threads of ONNX Runtime's pool spin while they wait for the next one: for
about 90 ms with onnxruntime 1.31. On two cores this slows down the process that runs next. So a
timed run starts when all sides are idle, and the CPU time of the idle sides is reported.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.tools.report import Summary, rotated

_WINDOW_SECONDS = 0.03
_QUIET_SHARE = 0.1  # of a core: a spinning thread takes a whole one
_TIMEOUT_SECONDS = 10.0
_NANOSECONDS = 1e9
_CPU_CLOCK = 2  # the clock of a process is ~pid << 3 | 2 on Linux: clock_getcpuclockid(3)
_UNSURE_SECONDS = 0.02  # possible error of the kernel's count for the whole machine
_OTHERS = 0.2  # allowed share of a core for other processes; system services take less
_ATTEMPTS = 20
_SELDOM = 3  # every third round has the slow cases


class DisturbedError(RuntimeError):
    """Other processes computed during every attempt."""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process in seconds, finished threads included.

    This is one system call for any number of threads. Reading the files of 30 threads would take a
    tenth of `settle`'s window, and this process is watched, too.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime(~pid << 3 | _CPU_CLOCK)


def main_thread_seconds(pid: int) -> float:
    """CPU time of a process's first thread in seconds; in a server, this is its event loop."""
    schedstat = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii")
    return int(schedstat.split()[0]) / _NANOSECONDS


def _machine_seconds() -> float:
    """CPU time of all processes of this machine in seconds, to 10 ms per core.

    Time that the hypervisor gave to other machines counts, too, since it is lost here.
    """
    line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    user, nice, system, _idle, _waiting, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Watched:
    """A period: its length, the CPU seconds of each watched process, and other processes' load.

    Attributes:
        seconds: length of the period.
        taken: CPU seconds by process id.
        others: CPU time of all other processes, as a share of one core.
    """

    seconds: float = 0.0
    taken: dict[int, float] = field(default_factory=dict)
    others: float = 0.0


@contextmanager
def watched(*pids: int) -> Iterator[Watched]:
    """Watch processes during the block. The value is filled in at its end."""
    found = Watched()
    before = {pid: cpu_seconds(pid) for pid in pids}
    machine, start = _machine_seconds(), time.monotonic()
    yield found
    found.seconds = time.monotonic() - start
    found.taken = {pid: cpu_seconds(pid) - before[pid] for pid in pids}
    others = _machine_seconds() - machine - sum(found.taken.values()) - _UNSURE_SECONDS
    found.others = max(others, 0.0) / found.seconds


def settle(*pids: int, timeout: float = _TIMEOUT_SECONDS, window: float = _WINDOW_SECONDS) -> None:
    """Wait until this process and `pids` have been idle for a window of time.

    Args:
        pids: ids of other processes.
        timeout: seconds to wait at most.
        window: length of the window in seconds.

    Raises:
        TimeoutError: some of them did not become idle in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        with watched(os.getpid(), *pids) as seen:
            time.sleep(window)  # the window over which CPU time is compared
        busy = [pid for pid, took in seen.taken.items() if took / seen.seconds > _QUIET_SHARE]
        if not busy:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {busy} are still busy after {timeout:g} s")


@dataclass(frozen=True, slots=True)
class Case:
    """A case that is timed on every side.

    Attributes:
        title: its name in tables.
        ask: lets a side run the case and returns the seconds of each pass; their median counts.
        seldom: it takes long, so only every third round has it.
    """

    title: str
    ask: Callable[[Any], Sequence[float]]
    seldom: bool = False


@dataclass(slots=True)
class Turns:
    """Lets the sides of a comparison compute in turns, round by round.

    A side is an object with a process id, `pid`. Each computes while all others are idle. A round
    is repeated if other processes computed meanwhile.

    Attributes:
        allowed: share of a core that the rest of the machine may use.
        ms: milliseconds by case, side and round; the first side is ours.
        idle: largest share of a core that an idle side used.
        others: largest share of a core that the rest of the machine used in a counted round.
        disturbed: number of repeated rounds.
    """

    allowed: float = _OTHERS
    ms: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    idle: float = 0.0
    others: float = 0.0
    disturbed: int = 0

    def measure(self, sides: Mapping[str, Any], cases: Sequence[Case], rounds: int) -> None:
        """Add rounds of all cases, after one that does not count: it allocates memory.

        Args:
            sides: the sides by name.
            cases: the cases.
            rounds: number of counted rounds.

        Raises:
            DisturbedError: other processes computed in every attempt.
        """
        for number in range(-1, rounds):
            for case in cases:
                if case.seldom and max(number, 0) % _SELDOM:
                    continue
                found = self._round(sides, number, case)
                times = self.ms.setdefault(case.title, {name: [] for name in sides})
                for name, seconds in found.items() if number >= 0 else ():
                    times[name].append(1000 * Summary.of(seconds).median)

    def _round(
        self, sides: Mapping[str, Any], number: int, case: Case
    ) -> dict[str, Sequence[float]]:
        """Let each side compute once. The first side changes with `number`."""
        pids = [side.pid for side in sides.values()]
        for _ in range(_ATTEMPTS):
            found = {}
            others = 0.0
            for name in rotated(list(sides), number):
                settle(*pids)
                with watched(os.getpid(), *pids) as seen:
                    found[name] = case.ask(sides[name])
                taken = [seen.taken[pid] for pid in pids if pid != sides[name].pid]
                self.idle = max(self.idle, max(taken, default=0.0) / seen.seconds)
                others = max(others, seen.others)
            if others <= self.allowed:
                self.others = max(self.others, others)
                return found
            self.disturbed += 1
        raise DisturbedError(f"other processes keep computing: {others:.0%} of a core")

    @property
    def note(self) -> str:
        """A note on the rounds."""
        return (
            f"sides in turns: idle sides used at most {self.idle:.1%} of a core, other processes "
            f"{self.others:.0%}; {self.disturbed} rounds were repeated because of other processes"
        )
