"""The watchdog kills a server that hangs, bears with a slow one, and ends with it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path

import pytest

import specops
from specops.http import watchdog
from tests.loopback import HOST, Handler, free_port, listening
from tests.waiting import answers, wait

SERVES = """
import sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
from specops.http.watchdog import watched
here = ("127.0.0.1", int(sys.argv[1]))
with watched(*here):
    HTTPServer(here, SimpleHTTPRequestHandler).serve_forever()
"""
IMPATIENT = """
import sys
from specops.http import watchdog
watchdog._ANSWER_SECONDS, watchdog._PAUSE_SECONDS = 0.2, 0.01
watchdog.main(sys.argv[1:])
"""
Activity = tuple[str, ...] | None


class Server:
    """One that answers as its script says, then for ever as at its end, and ends after a while."""

    def __init__(self, script: str, *, questions: int = 1000) -> None:
        self.script = script
        self.questions = questions
        self.asked = 0

    def answers(self) -> bool:
        self.asked += 1
        return self.script[min(self.asked, len(self.script)) - 1] == "+"

    def ended(self) -> bool:
        return self.asked >= self.questions

    def watched(self, activity: Iterator[Activity]) -> str | None:
        return watchdog.watch(self.answers, lambda: next(activity), self.ended)


def still(state: str) -> Iterator[Activity]:
    while True:
        yield state, "0", "0", "7", "2"


def computing() -> Iterator[Activity]:
    for ticks in count():
        yield "R", "0", "0", str(ticks), "2"


def test_a_server_that_answers_is_watched_until_it_ends() -> None:
    assert Server("+", questions=500).watched(still("S")) is None


def test_a_server_that_is_silent_and_still_hangs() -> None:
    server = Server("+++-")
    assert server.watched(still("T")) == "it answers nothing and computes nothing"
    assert server.asked == 3 + 4  # the first one in vain says how it stood then


@pytest.mark.parametrize("activity", [computing(), still("t"), repeat(None)])
def test_a_silent_server_that_computes_or_is_debugged_has_as_long_as_a_request(
    activity: Iterator[Activity],
) -> None:
    server = Server("-")
    problem = server.watched(activity)
    assert problem == "it has answered nothing for longer than a request may take"
    assert server.asked == watchdog._UNANSWERED


def test_each_answer_starts_anew() -> None:
    assert Server("---+" * 100, questions=400).watched(still("S")) is None
    assert Server(("-" * 44 + "+") * 9, questions=405).watched(computing()) is None


def test_an_answer_is_whatever_somebody_says() -> None:
    class Refusing(Handler):
        def do_GET(self) -> None:
            self.reply(503, {})

    with listening(Refusing) as port:
        assert watchdog.answers(HOST, port)
    assert not watchdog.answers(HOST, port)


def test_the_activity_of_a_process_changes_with_what_it_computes() -> None:
    before = watchdog.activity(os.getpid())
    assert before is not None
    wait("it has computed", lambda: watchdog.activity(os.getpid()) != before)
    assert watchdog.activity(1 << 30) is None


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server with its watchdog, and its port."""
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", SERVES, str(port)], stderr=subprocess.PIPE) as one:
        wait("it answers", lambda: answers(f"http://{HOST}:{port}/"))
        yield one, port
        one.kill()


def watchdog_of(process: int) -> int:
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    (child,) = (int(child) for child in children)
    return child


def test_a_stopped_server_is_killed_and_the_log_says_so(
    server: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, port = server
    process.send_signal(signal.SIGSTOP)
    command = [sys.executable, "-c", IMPATIENT, str(process.pid), "0.0.0.0", str(port)]  # noqa: S104
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as other:
        assert other.stderr is not None
        (line,) = other.stderr  # until it has ended
    assert process.wait(60) == -signal.SIGKILL
    told = json.loads(line)
    assert (told["level"], told["process"]) == ("critical", process.pid)
    assert told["message"] == "the server hangs: it is killed"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_watchdog_ends_with_its_server(
    server: tuple[subprocess.Popen[bytes], int], number: signal.Signals
) -> None:
    process, _ = server
    beside = watchdog_of(process.pid)
    gone = os.pidfd_open(beside)
    os.kill(beside, signal.SIGINT)  # as with Ctrl-C: it leaves that to the server
    process.send_signal(number)
    process.wait(60)
    assert select.select([gone], [], [], 60)[0]
    os.close(gone)


def test_it_starts_without_the_service() -> None:
    """It stays as long as the server: what that imports would take its memory once more."""
    code = "import sys, specops.http.watchdog; print(*sys.modules)"
    env = {"PYTHONPATH": str(Path(specops.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("specops")} == {
        "specops",
        "specops.http",
        "specops.http.watchdog",
    }
    assert not loaded & {"numpy", "fastapi", "onnxruntime", "httpx", "logging", "ssl"}
