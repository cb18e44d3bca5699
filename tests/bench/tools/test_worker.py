"""A process under comparison answers, or is named with the last lines of its output."""

import os
import sys

import pytest

from bench.tools.worker import Worker, WorkerError

SERVE = """
import os, sys, time
from bench.tools.worker import serve
class Side:
    def echo(self, text): print("noise"); return {"heard": text}
    def variable(self, name): return os.environ[name]
    def leave(self): sys.exit("illegal instruction")
    def die(self): os.kill(os.getpid(), 9)
    def sleep(self): time.sleep(60)
serve(Side())
"""


def worker(code: str = SERVE, patience: float = 60.0) -> Worker:
    return Worker("peer", [sys.executable, "-c", code], {"PEER": "1"}, patience)


def test_requests_are_answered_one_by_one_until_the_block_ends() -> None:
    with worker() as peer:
        assert peer.ask("variable", name="PEER") == "1"
        long = "x" * 300_000  # more than a pipe holds
        assert peer.ask("echo", text=long) == {"heard": long}
    with pytest.raises(ProcessLookupError):
        os.kill(peer.pid, 0)


@pytest.mark.parametrize(
    ("do", "told"),
    [
        ("leave", r"peer ended \(1\).*\n  illegal instruction"),
        ("dance", "no attribute 'dance'"),
        ("die", r"ended \(-9\); it said:\n  nothing"),
    ],
)
def test_a_peer_that_dies_is_named_with_its_last_words(do: str, told: str) -> None:
    with worker() as peer, pytest.raises(WorkerError, match=told):
        peer.ask(do)


def test_a_silent_peer_is_not_waited_for_without_end() -> None:
    with worker(patience=0.2) as peer:
        with pytest.raises(WorkerError, match=r"did not answer within 0\.2 s"):
            peer.ask("sleep")
        os.kill(peer.pid, 9)
