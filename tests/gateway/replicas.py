"""Real replicas of the demo pair behind the real Envoy, and clients that never rest."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx

from tests.gateway.running import START_SECONDS, Gateway, gateway
from tests.loopback import HOST, free_port
from tests.stack.support import ROOT
from tests.waiting import answers, wait

REQUEST_SECONDS = 120.0
TURNS = 8  # requests of a session
GONE = '"code":"replica_gone"}}'  # how the error event of a stream ends whose replica is gone


@dataclass
class Replica:
    """One `specops serve`, which can be ended and started again at the same port."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def start(self, **settings: object) -> None:
        own = {"SPECOPS_MODEL": "demo", "SPECOPS_THREADS": "1", "SPECOPS_PORT": str(self.port)}
        own |= {f"SPECOPS_{name.upper()}": str(value) for name, value in settings.items()}
        with (self.folder / f"{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "specops", "serve"],
                cwd=ROOT,
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self) -> None:
        wait("the model is ready", lambda: answers(f"{self.url}/health"), 300)

    def figure(self, name: str) -> float:
        """A counter of the replica's own, over all its labels."""
        rows = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        found = [row for row in rows if row.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(row.rpartition(" ")[2]) for row in found)


@dataclass
class Fleet:
    """Replicas and their gateway."""

    gateway: Gateway
    replicas: list[Replica]

    def wait_all_in(self) -> None:
        wait("all are in", lambda: self.gateway.healthy() == len(self.replicas), 120)


@contextmanager
def fleet(size: int, folder: Path) -> Iterator[Fleet]:
    """That many replicas behind a gateway, ready."""
    replicas = [Replica(folder) for _ in range(size)]
    with ExitStack() as stack:
        for replica in replicas:
            stack.callback(_end, replica)
            replica.start()
        for replica in replicas:
            replica.wait_ready()
        ports = [replica.port for replica in replicas]
        # All clients of a test are one address.
        running = stack.enter_context(gateway(ports, folder, {"GATEWAY_CLIENT_RATE": "5000"}))
        yield Fleet(running, replicas)


def _end(replica: Replica) -> None:
    if replica.process is not None:
        replica.process.kill()
        replica.process.wait()


@dataclass
class Load:
    """What clients have seen.

    Attributes:
        whole: answers that were complete.
        told: streams that had begun and ended with the error event of a replica that is gone.
        cut: streams that broke off after they had begun.
        failed: requests that failed before, each with the reason.
    """

    url: str
    whole: Counter[str] = field(default_factory=Counter)
    told: int = 0
    cut: int = 0
    failed: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: Iterator[int] = field(default_factory=count)

    def total(self) -> int:
        return self.whole.total()

    def wait_more(self, more: int) -> None:
        """Until so many more answers are whole."""
        wanted = self.total() + more
        wait(f"{more} more answers", lambda: self.total() >= wanted, REQUEST_SECONDS)

    def _ask(self, client: httpx.Client, session: str, number: int) -> None:
        stream = number % 2 == 0
        body = {"prompt": f"def part_{session}(a, b):\n", "max_new_tokens": 24, "ignore_eos": True}
        headers = {"X-Session-ID": str(session)}
        begun = done = told = False
        try:
            with client.stream(
                "POST", "/generate", json={**body, "stream": stream}, headers=headers
            ) as answer:
                begun = answer.status_code == 200 and stream
                text = answer.read().decode()
                done = not stream or "[DONE]" in text
                told = begun and text.endswith(f"{GONE}\n\n")
            problem = "" if answer.status_code == 200 and done else f"{answer.status_code} {text}"
        except httpx.TransportError as error:
            problem = repr(error)
        with self._lock:
            if not problem:
                self.whole["stream" if stream else "one piece"] += 1
            elif told:
                self.told += 1
            elif begun:
                self.cut += 1
            else:
                self.failed.append(problem)

    def _client(self, number: int) -> None:
        turns = count()
        with httpx.Client(base_url=self.url, timeout=REQUEST_SECONDS) as client:
            while not self._ended.is_set():
                session = f"{number}_{next(turns) // TURNS}"
                self._ask(client, session, next(self._numbers))


@contextmanager
def load(url: str, clients: int) -> Iterator[Load]:
    """So many clients that ask until the block ends, with a new session every `TURNS` requests."""
    seen = Load(url)
    threads = [threading.Thread(target=seen._client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        seen._ended.set()
        for thread in threads:
            thread.join(REQUEST_SECONDS + START_SECONDS)
