"""Clients that ask a gateway without a pause, and what they see."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import httpx

from tests.gateway.running import START_SECONDS
from tests.waiting import wait

REQUEST_SECONDS = 120.0
TURNS = 8  # requests of a session
GONE = '"code":"replica_gone"}}'  # the end of the error event of a stream whose replica is gone


@dataclass
class Load:
    """What clients have seen.

    Attributes:
        whole: complete answers.
        told: streams that had begun and ended with the error event of a replica that is gone.
        cut: streams that broke off after they had begun.
        failed: requests that failed before an answer began, each with the reason.
    """

    url: str
    whole: int = 0
    told: int = 0
    cut: int = 0
    failed: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: Iterator[int] = field(default_factory=count)

    def wait_more(self, more: int) -> None:
        """Wait until so many more answers are complete."""
        wanted = self.whole + more
        wait(f"{more} more answers", lambda: self.whole >= wanted, REQUEST_SECONDS)

    def ask(self, client: httpx.Client, session: str, number: int) -> None:
        stream = number % 2 == 0
        body = {"prompt": f"def part_{session}(a, b):\n", "max_new_tokens": 24, "ignore_eos": True}
        body["stream"] = stream
        begun = told = False
        problem = ""
        try:
            headers = {"X-Session-ID": session}
            with client.stream("POST", "/generate", json=body, headers=headers) as answer:
                begun = answer.status_code == 200 and stream
                text = answer.read().decode()
                told = begun and text.endswith(f"{GONE}\n\n")
            if answer.status_code != 200 or (stream and "[DONE]" not in text):
                problem = f"{answer.status_code} {text}"
        except httpx.TransportError as error:
            problem = repr(error)
        with self._lock:
            if not problem:
                self.whole += 1
            elif told:
                self.told += 1
            elif begun:
                self.cut += 1
            else:
                self.failed.append(problem)
        if problem:
            self._ended.wait(
                0.1
            )  # as long as a server without room asks a client to wait, at least

    def run_client(self, number: int) -> None:
        turns = count()
        with httpx.Client(base_url=self.url, timeout=REQUEST_SECONDS) as client:
            while not self._ended.is_set():
                self.ask(client, f"{number}_{next(turns) // TURNS}", next(self._numbers))

    def require_no_failure(self, told: int = 0) -> None:
        """No request failed, and at most `told` streams ended with an error event."""
        assert (self.failed, self.cut) == ([], 0)
        assert self.told <= told


@contextmanager
def load(url: str, clients: int) -> Iterator[Load]:
    """Run clients until the block ends; each begins a new session every `TURNS` requests."""
    seen = Load(url)
    threads = [threading.Thread(target=seen.run_client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        seen._ended.set()
        for thread in threads:
            thread.join(REQUEST_SECONDS + START_SECONDS)
