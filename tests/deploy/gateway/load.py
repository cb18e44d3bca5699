"""Clients that ask a gateway without a pause, and what they see."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import httpx

from bench.serving.load import Answer, Ask, Script, following
from tests.waiting import wait

REQUEST_SECONDS = 120.0
TURNS = 8  # requests of a session
GONE = '"code":"replica_gone"}}'  # the end of the error event of a stream whose replica is gone
_AGAIN_SECONDS = 0.1  # as long as a server without room asks a client to wait, at least


@dataclass
class Load:
    """What clients have seen.

    Attributes:
        whole: complete answers.
        error_events: streams that ended with the error event of a replica that is gone.
        broken: other answers whose head had been sent when their replica was killed. A gateway
            cannot take a head back.
        cut: streams that broke off after they had begun.
        failed: requests that failed before an answer began, each with the reason.
        ended: whether the clients leave after their next answer.
    """

    whole: int = 0
    error_events: int = 0
    broken: int = 0
    cut: int = 0
    failed: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    _numbers: Iterator[int] = field(default_factory=count)

    def wait_more(self, more: int) -> None:
        """Wait until so many more answers are complete."""
        enough = self.whole + more
        wait(f"{more} more answers", lambda: self.whole >= enough, REQUEST_SECONDS)

    def client(self, number: int) -> Script:
        """A client that asks until the load ends; every second request of all clients streams."""
        pause, turns = 0.0, count()
        while not self.ended.is_set():
            session = f"{number}_{next(turns) // TURNS}"
            body = {"prompt": f"def part_{session}(a, b):\n", "max_new_tokens": 24}
            body |= {"ignore_eos": True, "stream": next(self._numbers) % 2 == 0}
            answer = yield Ask("/generate", body, {"X-Session-ID": session}, pause)
            self._count(answer)
            pause = 0.0 if answer.complete else _AGAIN_SECONDS

    def _count(self, answer: Answer) -> None:
        if answer.complete:
            self.whole += 1
        elif answer.status == 200 and not answer.streamed:
            self.broken += 1
        elif answer.status != 200:
            self.failed.append(f"{answer.status} {answer.problem} {answer.body[:500]!r}")
        elif answer.body.endswith(f"{GONE}\n\n".encode()):
            self.error_events += 1
        else:
            self.cut += 1

    def require_no_failure(self, begun: int = 0) -> None:
        """No request failed, and at most so many answers that had begun did not end."""
        assert (self.failed, self.cut) == ([], 0)
        assert self.error_events + self.broken <= begun


@contextmanager
def load(url: str, clients: int) -> Iterator[Load]:
    """Run clients until the block ends; each begins a new session every `TURNS` requests."""
    port = httpx.URL(url).port
    assert port is not None
    seen = Load()
    with following(port, [seen.client(number) for number in range(clients)]):
        try:
            yield seen
        finally:
            seen.ended.set()
