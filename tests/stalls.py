"""`python -m tests.stalls`: nobody waits while others send the costliest bodies that are taken.

A real server serves the demo pair. Two clients send it the bodies of `tests.http.costly`, every
field of every endpoint with every costly value, while a process of its own asks for `/health/live`
every few milliseconds, as it did before for as long with nobody else there. The exit status is 1
if one in a hundred of these answers takes longer than 25 ms; the bodies that came before the
longest waits follow. Times for which the server's event loop or the client waited for a core do not
count, so other processes of the machine do not; `make check` allows 50 ms, for slow cores. Half a
minute; with all bodies three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

from bench.serving import load
from bench.tools.machine import describe
from specops.config import Settings
from specops.http.app import create_app
from tests.http.costly import Costly, of_fields, of_structure
from tests.loopback import HOST
from tests.overload import serving

ALLOWED = 0.025  # seconds
PERIOD = 0.004
SHOWN = 5
CLIENTS = 2
IDLE_SECONDS = 10.0
FEW = 1000  # bodies by default

Probe = tuple[float, float]  # when it was sent, by `time.monotonic`, and seconds to its answer


def queued(pid: int) -> float:
    """Seconds for which a process' first thread, the server's event loop, waited for a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def probe(port: int, pid: int, pipe: Connection) -> None:
    """Ask for /health/live until a message comes; send when each was asked and its seconds.

    The first message says that the first answer has come.
    """
    connection, found = http.client.HTTPConnection(HOST, port, timeout=60), list[Probe]()
    while not pipe.poll():
        sent, waited = time.monotonic(), queued(pid) + queued(os.getpid())
        connection.request("GET", "/health/live")
        connection.getresponse().read()
        waited = queued(pid) + queued(os.getpid()) - waited
        found.append((sent, time.monotonic() - sent - waited))
        if len(found) == 1:
            pipe.send("begun")
        time.sleep(PERIOD)
    pipe.send(found)


class Prober:
    """A process that measures `/health/live` within the block."""

    def __init__(self, port: int, pid: int) -> None:
        self._server = port, pid
        self.probes: list[Probe] = []

    def __enter__(self) -> Prober:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=probe, args=(*self._server, there))
        self._process.start()
        self._here.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._here.send("end")
        self.probes = self._here.recv()
        self._process.join()

    @property
    def row(self) -> str:
        """The times in milliseconds."""
        times = [seconds * 1e3 for _, seconds in self.probes]
        return f"{median(times):6.1f} {quantiles(times, n=100)[-1]:8.1f} {max(times):8.1f}"

    @property
    def late(self) -> float:
        """The 99th percentile in seconds."""
        return quantiles([seconds for _, seconds in self.probes], n=100)[-1]


async def send(port: int, bodies: Sequence[Costly]) -> list[tuple[float, float, Costly, int]]:
    """Send all bodies; return when each was sent and answered, and the statuses."""
    left, sent = iter(bodies), []

    async def client() -> None:
        connection = load.Connection(port)
        for body in left:
            start = time.monotonic()
            answer = await connection.send(load.Ask(body.path, body.content))
            if not answer.status:
                raise ConnectionError(f"{body.path} {body.name}: {answer.problem}")
            sent.append((start, time.monotonic(), body, answer.status))
        await connection.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return sent


def late(bodies: Sequence[Costly]) -> float:
    """Measure with these bodies and print the figures; return the 99th percentile in seconds.

    Raises:
        SystemExit: the server made a mistake or ended.
    """
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (port, process):
        with Prober(port, process.pid) as idle:
            time.sleep(IDLE_SECONDS)
        with Prober(port, process.pid) as busy:
            sent = asyncio.run(send(port, bodies))
        ended = process.poll()
    print("/health/live, ms       median      99 %  longest")
    print(f"nobody else            {idle.row}")
    print(f"{len(bodies):5} costly bodies     {busy.row}")
    for start, seconds in sorted(busy.probes, key=lambda item: -item[1])[:SHOWN]:
        beside = [
            f"{body.path} {body.name} ({status})"
            for begun, done, body, status in sent
            if begun < start + seconds and done > start
        ]
        print(f"  {seconds * 1e3:.0f} ms beside {', '.join(beside)}")
    # 501: this model cannot fill in a gap.
    mistakes = [body for *_, body, status in sent if status >= 500 and status != 501]
    failed = [f"{body.path} {body.name}" for body in mistakes]
    if failed:
        print(f"{len(failed)} answers were the server's mistakes: {', '.join(failed[:SHOWN])}")
    if ended is not None:
        print(f"the server ended with status {ended}")
    if failed or ended is not None:
        sys.exit(1)
    return busy.late


def main() -> int:
    """Measure, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.stalls", description=__doc__)
    parser.add_argument("--bodies", type=int, default=FEW, help="0: all, some thousands")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--allowed", type=float, default=ALLOWED, help="seconds")
    options = parser.parse_args()
    model = "demo"
    bodies = [*of_structure(model), *of_fields(create_app(Settings()), model)]
    random.Random(options.seed).shuffle(bodies)
    bodies = bodies[: options.bodies or len(bodies)]
    print(describe())
    return 0 if late(bodies) <= options.allowed else 1


if __name__ == "__main__":
    sys.exit(main())
