"""The watchdog kills a server that hangs, is patient with a slow one, and ends with it."""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from specops.http.server import watchdog
from tests.http.connections import imported_by
from tests.loopback import HOST, Handler, free_port, listening
from tests.waiting import PATIENCE, answers, wait

SERVES = """
import sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
from specops.http.server.watchdog import watched
here = ("127.0.0.1", int(sys.argv[1]))
with watched(*here, 300):
    HTTPServer(here, SimpleHTTPRequestHandler).serve_forever()
"""
IMPATIENT = """
import sys
from specops.http.server import watchdog
watchdog._ANSWER_SECONDS, watchdog._PAUSE_SECONDS, watchdog._IDLE_SECONDS = 0.2, 0.01, 0.5
watchdog.main(sys.argv[1:])
"""
Activity = tuple[str, ...] | None
IDLE = "it neither answers nor computes anything"
SILENT = "it has answered nothing for longer than a request may take"


def still(state: str) -> Iterator[Activity]:
    return repeat((state, "0", "0", "7", "2"))


def computing() -> Iterator[Activity]:
    return (("R", "0", "0", str(ticks), "2") for ticks in count())


@pytest.mark.parametrize(
    ("script", "activity", "problem", "asked"),
    [
        ("+" * 500, still("S"), None, 500),
        ("+++" + "-" * 99, still("T"), IDLE, 3 + 4),  # the first silence only notes the activity
        ("-" * 999, computing(), SILENT, 45),
        ("-" * 999, still("t"), SILENT, 45),  # a debugger holds it
        ("-" * 999, repeat(None), SILENT, 45),
        ("---+" * 100, still("S"), None, 400),  # each answer starts anew
        (("-" * 44 + "+") * 9, computing(), None, 405),
        # Each question fails at once: the same seconds, twice as many questions.
        ("+++" + "." * 99, still("T"), IDLE, 3 + 7),
        ("." * 999, computing(), SILENT, 90),
        # All was suspended in between, for an hour each time: no more than ten seconds count.
        ("-" + "z" * 30 + "+", computing(), None, 32),
        ("-" + "z" * 99, computing(), SILENT, 37),
    ],
)
def test_a_server_hangs_when_it_is_silent_and_idle_or_silent_for_long(
    script: str, activity: Iterator[Activity], problem: str | None, asked: int
) -> None:
    """The server ends with the script. Its signs: + an answer, - silence, . a refusal at once,
    z a suspension."""
    questions: list[str] = []
    seconds = {"+": 4.0, "-": 8.0, ".": 4.0, "z": 3600.0}
    now = 0.0

    def answered() -> bool:
        nonlocal now
        questions.append(script[len(questions)])
        now += seconds[questions[-1]]
        return questions[-1] == "+"

    found = watchdog.watch(
        answered,
        lambda: next(activity),
        lambda: len(questions) == len(script),
        360.0,
        lambda: now,
    )
    assert (found, len(questions)) == (problem, asked)


def test_the_patience_follows_the_deadline_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    started = MagicMock()
    monkeypatch.setattr(subprocess, "Popen", started)
    for seconds in (300, 7200):
        with watchdog.watched(HOST, 8000, seconds):
            pass
    assert [call.args[0][-1] for call in started.call_args_list] == ["360.0", "7260.0"]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", PATIENCE)


@pytest.mark.usefixtures("patient")
def test_any_answer_counts_as_one() -> None:
    class Refusing(Handler):
        def do_GET(self) -> None:
            self.reply(503, {})

    with listening(Refusing) as port:
        assert watchdog.answers(HOST, port)
    with socket.socket() as silent:  # nobody else gets its port
        silent.bind((HOST, 0))
        assert not watchdog.answers(*silent.getsockname())


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("linger", [(0, 0), (1, 0)])
def test_a_connection_that_the_server_closes_is_an_answer(linger: tuple[int, int]) -> None:
    """It has too many: a crowd of clients must not get it killed."""
    with socket.create_server((HOST, 0)) as listener:

        def close() -> None:
            connection, _ = listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", *linger))
            connection.close()

        closing = threading.Thread(target=close)
        closing.start()
        assert watchdog.answers(HOST, listener.getsockname()[1])
        closing.join()


def test_the_activity_of_a_process_changes_when_it_computes() -> None:
    before = watchdog.activity(os.getpid())
    assert before is not None
    while watchdog.activity(os.getpid()) == before:
        sum(range(100_000))
    assert watchdog.activity(1 << 30) is None


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server with its watchdog, and its port."""
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", SERVES, str(port)], stderr=subprocess.PIPE) as one:
        wait("it answers", lambda: answers(f"http://{HOST}:{port}/"))
        yield one, port
        one.kill()


def test_a_stopped_server_is_killed_and_the_log_says_so(
    server: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, port = server
    process.send_signal(signal.SIGSTOP)
    command = [sys.executable, "-c", IMPATIENT, str(process.pid), "0.0.0.0", str(port), "60"]  # noqa: S104
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as other:
        assert other.stderr is not None
        (line,) = other.stderr  # until it has ended
    assert process.wait(60) == -signal.SIGKILL
    record = json.loads(line)
    assert (record["level"], record["process"]) == ("critical", process.pid)
    assert record["message"] == "killing the server: it hangs"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_watchdog_ends_with_its_server(
    server: tuple[subprocess.Popen[bytes], int], number: signal.Signals
) -> None:
    process, _ = server
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (beside,) = map(int, children)
    gone = os.pidfd_open(beside)
    os.kill(beside, signal.SIGINT)  # as with Ctrl-C: it leaves that to the server
    process.send_signal(number)
    process.wait(60)
    assert select.select([gone], [], [], 60)[0]
    os.close(gone)


def test_it_starts_without_the_service() -> None:
    """It stays as long as the server: what that imports would take its memory once more."""
    loaded = imported_by("specops.http.server.watchdog")
    own = "specops.http.server"
    assert {name for name in loaded if name.startswith("specops")} == {
        *("specops", "specops.http", own, f"{own}.address", f"{own}.watchdog")
    }
    assert not loaded & {"numpy", "fastapi", "onnxruntime", "httpx", "logging", "ssl"}
