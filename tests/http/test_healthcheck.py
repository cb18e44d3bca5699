"""The healthcheck waits for a model that is on its way, and for nothing else."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from scripts.native import Address, awaited
from specops.engine.model_info import ModelState
from specops.http.server import healthcheck, watchdog
from specops.http.server.address import reachable
from tests.http.connections import imported_by
from tests.loopback import HOST, Handler, can_listen, listening

Health = dict[str, Any] | None


def state(name: str, detail: str = "", error: str | None = None) -> dict[str, Any]:
    return {"state": name, "detail": detail, "error": error}


DOWNLOAD = [state("downloading", f"{done} of 20000 MB") for done in range(20_000)]


@pytest.mark.parametrize(
    ("answers", "problem", "seconds"),
    [
        ([state("ready")], None, 0),
        ([*DOWNLOAD, state("loading"), state("ready")], None, 20_001),  # as long as it moves
        (
            [state("downloading", "1 of 2 MB")] * 2000,
            "nothing new for 900 s: downloading 1 of 2 MB",
            900,
        ),
        (
            [state("downloading", "1 MB"), state("failed", error="the hub has no a/b (404)")],
            "failed: the hub has no a/b (404)",
            1,
        ),
        ([state("draining")], "draining: -", 0),
        ([None] * 15 + [state("ready")], None, 15),  # it may take its time to listen
        ([None] * 100, "/health has not answered for 20 s", 20),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_service_is_waited_for_as_long_as_something_moves(
    answers: list[Health], problem: str | None, seconds: int
) -> None:
    coming, now, sent = iter(answers), [0.0], list[str]()

    def pause(seconds: float) -> None:
        now[0] += seconds

    found = healthcheck.check(lambda: next(coming), sent.append, clock=lambda: now[0], pause=pause)
    assert (found, now[0]) == (problem, seconds)
    doing = [f"{item['state']} {item['detail']}".strip() for item in answers if item]
    assert sent == [
        text for text in dict.fromkeys(doing) if not text.startswith(("ready", "failed", "drain"))
    ]


def test_every_state_is_known() -> None:
    ends = {"ready", "failed", "draining"}
    assert {item.value for item in ModelState} == {*healthcheck._ON_ITS_WAY, *ends}


@contextmanager
def answering(*answers: Health, host: str = HOST) -> Iterator[int]:
    """A service on a port, which gives these answers one after another, the last for ever."""
    left = list(answers)

    class Answers(Handler):
        def do_GET(self) -> None:
            body = left.pop(0) if len(left) > 1 else left[0]
            self.reply(200 if body and body["state"] == "ready" else 503, body)

    with listening(Answers, host) as port:
        yield port


@pytest.mark.parametrize(
    ("last", "status", "said"),
    [(state("ready"), 0, ""), (state("failed", error="no room"), 1, "failed: no room\n")],
)
def test_the_command_says_how_it_went(
    last: Health,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(healthcheck, "_PAUSE_SECONDS", 0.0)
    with answering(state("converting", "50 %"), last) as port:
        assert healthcheck.main(["--port", str(port), "--progress"]) == status
    assert tuple(capsys.readouterr()) == ("converting 50 %\n", said)


HOSTS = ("127.0.0.1", "0.0.0.0", "127.0.0.2", "localhost", "::1", "::", "0::0")  # noqa: S104


@pytest.mark.parametrize("host", [*filter(can_listen, HOSTS)])
def test_the_address_that_is_served_is_asked(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECOPS_HOST", host)
    monkeypatch.setattr(healthcheck, "_SILENCE_SECONDS", 0.0)
    with answering(state("ready"), host=host) as port:
        monkeypatch.setenv("SPECOPS_PORT", str(port))
        assert healthcheck.main([]) == 0
        assert watchdog.answers(reachable(host), port)
        assert awaited(Address(host, port, "").url + "/health") is None


def test_an_unknown_name_is_as_good_as_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert healthcheck.ask_health(reachable("elsewhere"), 8000) is None


def test_an_answer_that_is_none_is_as_good_as_silence() -> None:
    with answering(None) as port:
        assert healthcheck.ask_health("127.0.0.1", port) is None
    assert healthcheck.ask_health("127.0.0.1", port) is None  # nothing listens any more


def test_it_starts_without_the_service() -> None:
    """It runs every five seconds: what the service imports would cost a second each time."""
    loaded = imported_by("specops.http.server.healthcheck")
    own = "specops.http.server"
    assert {name for name in loaded if name.startswith("specops")} == {
        *("specops", "specops.http", own, f"{own}.address", f"{own}.healthcheck")
    }
    assert not loaded & {"numpy", "fastapi", "onnxruntime", "httpx"}
