"""A process under comparison that misbehaves is named, with what it said last."""

from __future__ import annotations

import os
import sys

import pytest

from bench.tools.worker import Worker, WorkerError

ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"heard": json.loads(line)}), flush=True)
"""


def worker(code: str, patience: float = 60.0) -> Worker:
    return Worker("peer", [sys.executable, "-c", code], {"PEER": "1"}, patience)


def test_requests_are_answered_one_by_one() -> None:
    with worker(ECHO) as peer:
        assert peer.ask("load", model="m") == {"heard": {"do": "load", "model": "m"}}
        long = "x" * 300_000  # more than a pipe holds
        assert peer.ask("logits", text=long)["heard"]["text"] == long


def test_an_object_answers_by_its_methods_and_what_it_prints_is_no_answer() -> None:
    code = """
from bench.tools.worker import serve
class Side:
    def add(self, one, two):
        print("adding")
        return {"sum": one + two}
serve(Side())
"""
    with worker(code) as peer:
        assert peer.ask("add", one=1, two=2) == {"sum": 3}
        with pytest.raises(WorkerError, match="no attribute 'dance'"):
            peer.ask("dance")


def test_it_is_gone_after_its_block() -> None:
    with worker(ECHO) as peer:
        pid = peer.pid
        assert peer.ask("load")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_it_gets_variables_of_its_own() -> None:
    code = "import os, json; input(); print(json.dumps(os.environ['PEER']), flush=True); input()"
    with worker(code) as peer:
        assert peer.ask("load") == "1"


def test_a_peer_that_dies_is_named_with_its_last_words() -> None:
    code = "import sys; input(); sys.exit('illegal instruction')"
    with (
        worker(code) as peer,
        pytest.raises(WorkerError, match=r"peer ended \(1\).*\n  illegal instruction"),
    ):
        peer.ask("load")


def test_a_peer_that_was_dead_before_is_named_too() -> None:
    with worker("import sys; sys.exit('no such library')") as peer:
        peer._process.wait()
        with pytest.raises(WorkerError, match="no such library"):
            peer.ask("load")


def test_a_peer_that_was_killed_is_told_by_its_signal() -> None:
    with (
        worker("import os; input(); os.kill(os.getpid(), 9)") as peer,
        pytest.raises(WorkerError, match=r"ended \(-9\); it said:\n  nothing"),
    ):
        peer.ask("load")


def test_a_silent_peer_is_not_waited_for_without_end() -> None:
    code = "import sys; sys.stdin.read()"
    with (
        worker(code, patience=0.2) as peer,
        pytest.raises(WorkerError, match=r"did not answer within 0\.2 s"),
    ):
        peer.ask("load")


def test_nonsense_is_shown() -> None:
    with (
        worker("input(); print('Segmentation', flush=True); input()") as peer,
        pytest.raises(WorkerError, match="answered b'Segmentation' to load"),
    ):
        peer.ask("load")
