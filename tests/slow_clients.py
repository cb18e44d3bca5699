"""Clients that send half a request, or do not read their answer, beside a few honest clients.

`python -m tests.slow_clients --seconds 120` serves the demo pair. It prints the times of the honest
clients without and with the slow ones, and the time until the slow ones were gone. The slow clients
are a process of low priority, because in reality they run on other machines. A client whose
connection was closed connects again at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from bench.serving.load import HOST, Answer, Ask, Script, follow_all, metric, once
from tests.overload import PROMPT, serving

HONEST = 8
BODY = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
ASK = Ask("/v1/completions", BODY, {"connection": "close"})
# A stream that no buffer of the kernel holds, and pages that take no slot.
STREAM = Ask(ASK.path, BODY | {"max_tokens": 400, "stream": True, "logprobs": 5})
PAGES = 16 * b"GET / HTTP/1.1\r\nhost: test\r\naccept: text/html\r\n\r\n"
STREAMS = 50  # every so many readers begin with a stream, which takes a slot for a while
RECEIVE_BYTES = 4096
STARTED = "all are connected"


@dataclass
class Tally:
    """How honest requests ended: the seconds of each, and answers other than 200."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0  # refused with 429, and repeated
    others: list[Answer] = field(default_factory=list)


@dataclass(frozen=True)
class Crowd:
    """Numbers of slow clients, by what they are slow in."""

    headers: int
    bodies: int
    readers: int

    @property
    def number(self) -> int:
        return self.headers + self.bodies + self.readers


@dataclass(frozen=True)
class Report:
    """The result of a run.

    Attributes:
        without, beside: the honest clients without and beside the slow ones.
        closed: number of closed connections, by reason.
        seconds_after: time until nothing of the slow clients was left; None: something was.
    """

    without: Tally
    beside: Tally
    closed: dict[str, int]
    seconds_after: float | None

    @property
    def slowdown(self) -> float:
        return median(self.beside.seconds) / median(self.without.seconds)


def honest(port: int, seconds: float) -> Tally:
    """Run clients that ask again and again, and wait as long as a refusal says."""
    tally, end = Tally(), time.monotonic() + seconds

    def client() -> Script:
        while time.monotonic() < end:
            started, pause = time.monotonic(), 0.0
            while (answer := (yield replace(ASK, pause=pause))).status == 429:
                tally.refused += 1
                pause = answer.retry_after
            tally.seconds.append(time.monotonic() - started)
            if not answer.complete:
                tally.others.append(answer)

    asyncio.run(follow_all(port, (client() for _ in range(HONEST))))
    return tally


async def attack(port: int, crowd: Crowd) -> None:
    """Keep so many slow clients connected, without an end."""
    loop = asyncio.get_running_loop()
    connected = 0

    async def one(first: bytes, then: bytes, *, reads: bool) -> None:
        nonlocal connected
        sent = first
        while True:
            with socket.socket() as own:
                own.setblocking(False)
                if not reads:
                    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
                try:
                    await loop.sock_connect(own, (HOST, port))
                    await loop.sock_sendall(own, sent)
                    connected += sent is first
                    if connected == crowd.number:
                        connected += 1
                        print(STARTED, flush=True)
                    while reads and await loop.sock_recv(own, 1 << 16):
                        pass
                    while not reads:  # until it is cut off
                        await asyncio.sleep(1)
                        await loop.sock_sendall(own, b"GET / HTTP/1.1\r\n")
                except ConnectionError:
                    pass
            sent = then

    whole = Ask(ASK.path, BODY).content()
    half_head, half_body = whole[: whole.index(b"\r\n\r\n")], whole[:-20]
    clients = [one(half_head, half_head, reads=True) for _ in range(crowd.headers)]
    clients += [one(half_body, half_body, reads=True) for _ in range(crowd.bodies)]
    clients += [
        one(PAGES if index % STREAMS else STREAM.content(), PAGES, reads=False)
        for index in range(crowd.readers)
    ]
    await asyncio.gather(*clients)


@contextmanager
def attacking(port: int, crowd: Crowd) -> Iterator[subprocess.Popen[bytes]]:
    """Run the slow clients within the block, which begins when all are connected."""
    sizes = [str(size) for size in (crowd.headers, crowd.bodies, crowd.readers)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.slow_clients", "--attack", str(port), *sizes],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.nice(19),  # noqa: PLW1509 - no thread of this process holds a lock
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().decode().strip() == STARTED
        yield process
    finally:
        process.kill()
        process.communicate()


def descriptors(process: subprocess.Popen[bytes]) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


async def closings(port: int) -> dict[str, int]:
    """Return the number of connections that the server closed, by reason."""
    page = (await once(port, Ask("/metrics"))).body
    found = re.findall(rb'specops_connections_closed_total{reason="(\w+)"} (\S+)', page)
    return {reason.decode(): int(float(number)) for reason, number in found if float(number)}


async def left(port: int, process: subprocess.Popen[bytes], before: int) -> bool:
    """Return whether something of the slow clients is left."""
    taken = [await metric(port, f"specops_requests_{name}") for name in ("running", "waiting")]
    return any(taken) or descriptors(process) > before


def run(
    port: int,
    process: subprocess.Popen[bytes],
    crowd: Crowd,
    seconds: float,
    seconds_without: float = 30.0,
) -> Report:
    """Run honest clients alone, then beside the slow ones; then wait until those are gone."""
    honest(port, 1)
    without = honest(port, seconds_without)
    before = descriptors(process)
    with attacking(port, crowd) as crowded:
        beside = honest(port, seconds)
        os.kill(crowded.pid, 19)  # SIGSTOP: nothing is sent, read or closed any more
        stopped = time.monotonic()
        after = None
        while after is None and time.monotonic() < stopped + 60:
            if not asyncio.run(left(port, process, before)):
                after = time.monotonic() - stopped
            else:
                time.sleep(0.2)
    return Report(without, beside, asyncio.run(closings(port)), after)


def main() -> None:
    """Attack, or serve and be attacked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--headers", type=int, default=500)
    parser.add_argument("--bodies", type=int, default=500)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--attack", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        port, *sizes = options.attack
        asyncio.run(attack(port, Crowd(*sizes)))
    crowd = Crowd(options.headers, options.bodies, options.readers)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (port, process):
        report = run(port, process, crowd, options.seconds)
    for name, tally in (("without", report.without), ("beside", report.beside)):
        print(
            f"{name} slow clients: {len(tally.seconds)} requests, {len(tally.others)} of them not "
            f"200, median {median(tally.seconds) * 1000:.0f} ms, {tally.refused} times told to "
            "come back"
        )
    print(f"median {report.slowdown:.2f} times as long; connections closed: {report.closed}")
    after = report.seconds_after
    print("something was left" if after is None else f"all of it gone {after:.1f} s after")


if __name__ == "__main__":
    main()
