"""The healthcheck waits for a model that is on its way, and for nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import specops
from specops.engine.engine import ModelState
from specops.http import healthcheck
from tests.loopback import Handler, listening

Health = dict[str, Any] | None


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def outcome(answers: Iterator[Health]) -> tuple[str | None, list[str], float]:
    """What the check says of a service that answers so, what it told, and when it ended."""
    clock, told = Clock(), list[str]()
    problem = healthcheck.check(lambda: next(answers), told.append, clock=clock, pause=clock.pause)
    return problem, told, clock.now


def state(name: str, detail: str = "", error: str | None = None) -> dict[str, Any]:
    return {"state": name, "detail": detail, "error": error}


def test_a_ready_service_is_healthy_at_once() -> None:
    assert outcome(iter([state("ready")])) == (None, [], 0.0)


def test_a_download_is_waited_for_as_long_as_it_moves() -> None:
    steps = [state("downloading", f"{done} of 20000 MB") for done in range(20_000)]
    problem, told, ended = outcome(iter([*steps, state("loading"), state("ready")]))
    assert problem is None
    assert ended > 5 * 3600
    assert told == [*(f"downloading {step['detail']}" for step in steps), "loading"]


def test_a_download_that_stands_still_is_given_up() -> None:
    problem, _, ended = outcome(iter([state("downloading", "1 of 2 MB")] * 2000))
    assert problem == "nothing new for 900 s: downloading 1 of 2 MB"
    assert ended == 900


def test_a_model_that_failed_ends_the_wait_with_the_reason() -> None:
    answers = [state("downloading", "1 MB"), state("failed", error="the hub has no a/b (404)")]
    problem, _, ended = outcome(iter(answers))
    assert problem == "failed: the hub has no a/b (404)"
    assert ended == 1


def test_a_service_that_drains_is_not_healthy() -> None:
    assert outcome(iter([state("draining")]))[0] == "draining: -"


def test_a_service_may_take_its_time_to_listen() -> None:
    assert outcome(iter([None] * 15 + [state("ready")]))[0] is None


def test_a_service_that_does_not_answer_is_not_healthy() -> None:
    problem, _, ended = outcome(iter([None] * 100))
    assert problem == "/health does not answer for 20 s"
    assert ended == 20


def test_every_state_is_known() -> None:
    ends = {"ready", "failed", "draining"}
    assert {item.value for item in ModelState} == {*healthcheck._ON_ITS_WAY, *ends}


@contextmanager
def answering(*answers: Health) -> Iterator[int]:
    """A service on a port, which gives these answers one after another, the last for ever."""
    left = list(answers)

    class Answers(Handler):
        def do_GET(self) -> None:
            body = left.pop(0) if len(left) > 1 else left[0]
            self.reply(200 if body and body["state"] == "ready" else 503, body)

    with listening(Answers) as port:
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


def test_an_answer_that_is_none_is_as_good_as_silence() -> None:
    with answering(None) as port:
        assert healthcheck.ask_health("127.0.0.1", port) is None
    assert healthcheck.ask_health("127.0.0.1", port) is None  # nobody listens any more


def test_it_starts_without_the_service() -> None:
    """It runs every five seconds: what the service imports would cost a second each time."""
    code = "import sys, specops.http.healthcheck; print(*sys.modules)"
    env = {"PYTHONPATH": str(Path(specops.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("specops")} == {
        "specops",
        "specops.http",
        "specops.http.healthcheck",
    }
    assert not loaded & {"numpy", "fastapi", "onnxruntime", "httpx"}
