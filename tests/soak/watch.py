"""What a soak sees of a server, and whether the server stays as it was."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.tools.quiet import watched
from tests.overload import resident_bytes

WINDOWS, HALF = 6, 3  # parts of the time
MORE = 2  # times that half of the time is added
SAMPLE_SECONDS = 2.0
REST_SECONDS = 4.0
MAX_GROWTH = 1.0  # MB of memory in an hour
STEP = 2.0  # MB that an allocator takes at once: shorter runs cannot tell it from less growth
LONG_MINUTES = 36.0
MAX_DRIFT = 0.15  # of the first window's 95th percentile
MAX_OTHERS = 0.5  # cores; more of them slow the server down
GATED_MINUTES = 10.0  # shorter runs have too few answers for percentiles


@dataclass(frozen=True)
class Sample:
    """One look at a process: time, bytes of memory without files, descriptors and threads."""

    moment: float
    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, process: subprocess.Popen[bytes]) -> Sample:
        folder = Path(f"/proc/{process.pid}")
        descriptors, threads = (len(list((folder / name).iterdir())) for name in ("fd", "task"))
        return cls(time.monotonic(), resident_bytes(process), descriptors, threads)

    @classmethod
    def over(cls, samples: Sequence[Sample], choose: Callable[..., Any]) -> Sample:
        """The largest or the smallest value of each kind."""
        names = ("moment", "memory", "descriptors", "threads")
        return cls(*(choose(getattr(one, name) for one in samples) for name in names))


@dataclass(frozen=True)
class Window:
    """One of the parts of the time; all parts have the same load.

    Attributes:
        seconds: the times of the answers.
        cpu: processor seconds of the server.
        others: cores that other processes than the server and its clients kept busy.
        samples: looks at the server.
    """

    seconds: Sequence[float]
    cpu: float
    others: float
    samples: Sequence[Sample]

    @property
    def p95(self) -> float:
        return statistics.quantiles(self.seconds, n=20)[-1]

    @property
    def row(self) -> str:
        """Answers; milliseconds of each: median, 95th percentile, the server's CPU; then the most
        memory in MB, descriptors and threads, and others' cores."""
        most = Sample.over(self.samples, max)
        number = len(self.seconds)
        times = (statistics.median(self.seconds), self.p95, self.cpu / number)
        cells = [str(number), *(f"{1000 * one:.0f}" for one in times), f"{most.memory / 1e6:.2f}"]
        return " | ".join([*cells, f"{most.descriptors} | {most.threads} | {self.others:.2f}"])


@dataclass
class Course:
    """All that a soak has seen of a server.

    Attributes:
        before, after: the server at rest, before and after the load.
        windows: the parts of the time, in order: six, and more where memory grew in a short run.
        problems: problems of its clients.
    """

    before: Sample
    after: Sample
    windows: list[Window]
    problems: Sequence[str] = field(default_factory=list)

    @property
    def long(self) -> bool:
        """Whether the memory of one hour can be told from this run."""
        return self.minutes >= LONG_MINUTES

    @property
    def seen_enough(self) -> bool:
        """Whether the time is over; growth in a short run has to go on to be a leak."""
        over = len(self.windows) - WINDOWS
        if over < 0 or over % HALF:
            return False
        return self.long or over == MORE * HALF or self.growth <= self.most_growth

    @property
    def warm(self) -> list[Sample]:
        """Without the first windows, in which memory warms up.

        In a short run this takes up to half of the time, as clients pile up beside other work.
        """
        windows = self.windows[1:] if self.long else self.windows[-HALF:]
        return [one for window in windows for one in window.samples]

    @property
    def most_growth(self) -> float:
        """MB of memory an hour that are allowed."""
        hours = (self.warm[-1].moment - self.warm[0].moment) / 3600
        return MAX_GROWTH if self.long else STEP / hours

    @property
    def growth(self) -> float:
        """MB of memory an hour: the slope of the straight line through the warm samples."""
        moments, memory = zip(*((one.moment, one.memory) for one in self.warm), strict=True)
        return statistics.linear_regression(moments, memory).slope * 3600 / 1e6

    @property
    def drift(self) -> float:
        """The growth of the 95th percentile from the first window to the last one, as a share."""
        return self.windows[-1].p95 / self.windows[0].p95 - 1

    @property
    def minutes(self) -> float:
        """The time that was asked for."""
        samples = [one for window in self.windows[:WINDOWS] for one in window.samples]
        return (samples[-1].moment - samples[0].moment + SAMPLE_SECONDS) / 60

    def reasons(self) -> list[str]:
        """Why the soak fails; empty if it passes."""
        found = list(self.problems[:10])
        if len(self.problems) > len(found):
            found.append(f"and {len(self.problems) - len(found)} more clients")
        if self.growth > self.most_growth:
            found.append(
                f"memory grows by {self.growth:.2f} MB an hour, more than {self.most_growth:.2f}"
            )
        for name in ("descriptors", "threads"):
            before, after = getattr(self.before, name), getattr(self.after, name)
            if after > before:
                found.append(f"{after} {name} at the end, {before} at the beginning")
        if self.minutes >= GATED_MINUTES and self.drift > MAX_DRIFT:
            found.append(f"the 95th percentile of the last window is {self.drift:.0%} longer")
        busiest = max(window.others for window in self.windows)
        if found and busiest > MAX_OTHERS:
            found.append(
                f"other programs kept {busiest:.1f} cores busy, so clients piled up, and memory "
                "with them: run it again on an idle machine"
            )
        return found


async def at_rest(process: subprocess.Popen[bytes]) -> Sample:
    """The least of each that a server without clients has within a few seconds."""
    end, seen = time.monotonic() + REST_SECONDS, [Sample.of(process)]
    while time.monotonic() < end:
        await asyncio.sleep(0.2)
        seen.append(Sample.of(process))
    return Sample.over(seen, min)


async def watch(
    process: subprocess.Popen[bytes], play: Awaitable[None], seconds: list[float]
) -> Window:
    """A window as long as `play`, which appends the times of answers to `seconds`."""
    samples = [Sample.of(process)]
    seconds.clear()
    playing = asyncio.ensure_future(play)
    with watched(process.pid, os.getpid()) as taken:
        while not (await asyncio.wait({playing}, timeout=SAMPLE_SECONDS))[0]:
            samples.append(Sample.of(process))
        await playing
    return Window(list(seconds), taken.taken[process.pid], taken.others, samples)
