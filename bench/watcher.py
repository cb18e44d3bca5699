"""Watches a running service as its users do, in a process of its own: Prometheus and open consoles.

    python -m bench.watcher PORT

It obeys lines on standard input and answers each with a line of JSON, so that whoever measures can
tell it from the load and read what it took itself:

    watch N     N Prometheuses, each with a scrape every 5 seconds, and N open consoles
    leave       close everything; says how many scrapes and figures there were
    scrape N    N scrapes, one right after the other
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PERIOD_SECONDS = 5.0  # prometheus/prometheus.yml
_HOST = "127.0.0.1"
_TIMEOUT_SECONDS = 30.0
# What Prometheus sends.
_HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0,"
    "application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "X-Prometheus-Scrape-Timeout-Seconds": "5",
}


class WatcherError(RuntimeError):
    """The watcher's process has ended, or the service does not answer it."""


class Scraper:
    """One Prometheus: a connection that stays open, and a page every few seconds."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection(_HOST, port, timeout=_TIMEOUT_SECONDS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.scrapes = 0

    def scrape(self) -> int:
        """Read the page once; its size in bytes."""
        self._connection.request("GET", "/metrics", headers=_HEADERS)
        response = self._connection.getresponse()
        size = len(response.read())
        if response.status != http.HTTPStatus.OK:
            raise WatcherError(f"/metrics answers {response.status}")
        self.scrapes += 1
        return size

    def start(self) -> None:
        """Scrape from a random moment of the period on, as Prometheus does."""
        self._connection.connect()
        self._thread.start()

    def stop(self) -> None:
        """Scrape no more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        pause = random.uniform(0, PERIOD_SECONDS)
        while not self._over.wait(pause):
            self.scrape()
            pause = PERIOD_SECONDS


class Console:
    """One open console: reads the figures that come once a second."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection(_HOST, port, timeout=_TIMEOUT_SECONDS)
        self._connection.connect()
        self._socket = self._connection.sock
        self._connection.request("GET", "/console/figures")
        self._response = self._connection.getresponse()
        if self._response.status != http.HTTPStatus.OK:
            raise WatcherError(f"/console/figures answers {self._response.status}")
        self.figures = 0
        self._next()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _next(self) -> None:
        while line := self._response.readline():
            if line.startswith(b"data: "):
                json.loads(line.removeprefix(b"data: "))
                self.figures += 1
                return
        raise WatcherError("the figures have ended")

    def _run(self) -> None:
        while True:
            try:
                self._next()
            except (OSError, http.client.HTTPException, WatcherError):
                if self._over.is_set():
                    return
                raise

    def stop(self) -> None:
        """Leave, in the middle of whatever comes."""
        self._over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()


class Watchers:
    """All that look on at the moment."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._scrapers: list[Scraper] = []
        self._consoles: list[Console] = []

    def watch(self, count: int) -> dict[str, int]:
        """Begin; returns when every console has had its first figures."""
        self._consoles = [Console(self._port) for _ in range(count)]
        self._scrapers = [Scraper(self._port) for _ in range(count)]
        for scraper in self._scrapers:
            scraper.start()
        return {"watching": count}

    def leave(self, _: int) -> dict[str, int]:
        """End; says what there was since `watch`."""
        for watcher in (*self._scrapers, *self._consoles):
            watcher.stop()
        scrapes = sum(scraper.scrapes for scraper in self._scrapers)
        figures = sum(console.figures for console in self._consoles)
        self._scrapers, self._consoles = [], []
        return {"scrapes": scrapes, "figures": figures}

    def scrape(self, count: int) -> dict[str, int]:
        """Read the page again and again."""
        scraper = Scraper(self._port)
        sizes = [scraper.scrape() for _ in range(count)]
        scraper.stop()
        return {"scrapes": count, "bytes": sizes[-1]}


class Process:
    """The other end: a watcher's process, and what it is told.

    Attributes:
        pid: its process id.
    """

    def __init__(self, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.watcher", str(port)],
            cwd=Path(__file__).resolve().parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def tell(self, order: str, count: int = 0) -> dict[str, Any]:
        """Give an order and wait for the answer.

        Raises:
            WatcherError: the process has ended.
        """
        assert self._process.stdin is not None  # noqa: S101 - both are pipes
        assert self._process.stdout is not None  # noqa: S101
        try:
            print(order, count, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise WatcherError("the watcher has ended") from None
        line = self._process.stdout.readline()
        if not line:
            raise WatcherError("the watcher has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Close its input, which ends it."""
        self._process.communicate()


@contextmanager
def watcher(port: int) -> Iterator[Process]:
    """Run a watcher beside this process."""
    process = Process(port)
    try:
        yield process
    finally:
        process.end()


def main() -> None:
    """Obey until standard input ends; see the module's docstring."""
    watchers = Watchers(int(sys.argv[1]))
    orders = {"watch": watchers.watch, "leave": watchers.leave, "scrape": watchers.scrape}
    for line in sys.stdin:
        order, count = line.split()
        print(json.dumps(orders[order](int(count))), flush=True)


if __name__ == "__main__":
    main()
