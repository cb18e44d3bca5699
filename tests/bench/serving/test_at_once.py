"""Requests at once: everybody gets the same ones, and what comes back is looked at."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.models import BenchModel
from bench.peers import environment
from bench.peers.compare import OURS, SideProcess
from bench.peers.models import LLAMA_CPP, OPENVINO, peer_models
from bench.serving import at_once
from bench.serving.at_once import HttpSide, Measured, Plan
from bench.serving.server import Client, ServerError
from bench.tools.quiet import Turns
from tests.bench.peers.test_compare import VOCAB, model, needs_peers, write_checkpoint
from tests.loopback import Handler, listening

__all__ = ["model"]  # a fixture

ANSWER = (
    {
        "choices": [
            {"logprobs": {"top_logprobs": [{"a": -1.0, "b": -2.0}]}, "finish_reason": "length"}
        ]
    },
    {"choices": [], "usage": {"completion_tokens": 1}},
)


@contextmanager
def answering(
    events: tuple[Any, ...], bodies: list[dict[str, Any]], together: int = 1
) -> Iterator[HttpSide]:
    """Clients of a server that streams the same to everybody once `together` requests are there."""
    arrived = threading.Barrier(together)

    class Answers(Handler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            bodies.append(self.body())
            arrived.wait(10)
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self.reply(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    with listening(Answers) as port, HttpSide(0, Client(port), 3) as side:
        yield side


def test_clients_ask_for_plain_decoding_all_at_once() -> None:
    """The server answers nobody before everybody has asked."""
    bodies: list[dict[str, Any]] = []
    prompts = [[1, 2], [3, 4], [5, 6]]
    with answering(ANSWER, bodies, together=3) as side:
        seconds, firsts = side.complete(prompts, 1)
    assert seconds > 0
    assert firsts == [["a", "b"]] * 3
    assert sorted(body["prompt"] for body in bodies) == prompts
    asked = {(body["model"], body["max_tokens"], body["drafter"]) for body in bodies}
    assert asked == {("m", 1, "none")}


def test_an_answer_that_is_too_short_is_no_measurement() -> None:
    with answering(ANSWER, []) as side, pytest.raises(ServerError, match="1 tokens came, not 2"):
        side.complete([[1]], 2)
    with answering((), []) as side, pytest.raises(ServerError, match="ended early"):
        side.complete([[1]], 2)


def made_up() -> Measured:
    measured = Measured(Plan(starts=1, rounds=3, clients=(1, 8)))
    measured.runs_on = {OURS: "a", LLAMA_CPP: "b", OPENVINO: "c"}
    measured.agreement = {LLAMA_CPP: 0.5, OPENVINO: 0.75}
    measured.turns.ms = {
        "1": {OURS: [2e3, 2e3, 4e3], LLAMA_CPP: [3.4e3, 3.4e3, 6.8e3], OPENVINO: [3.5e3] * 3},
        "8": {OURS: [8e3] * 3, LLAMA_CPP: [2e4] * 3, OPENVINO: [6.4e3] * 3},
    }
    measured.http = {"1": [0.01] * 3, "8": [0.02] * 3}
    return measured


def test_we_are_held_against_the_faster_peer() -> None:
    outcome = at_once.outcome("m", made_up())
    first, last = outcome.result["cases"]
    assert (first["rival"], last["rival"]) == (LLAMA_CPP, OPENVINO)
    assert first["tokens_per_second"][OURS]["median"] == 32
    assert [line.measured for line in outcome.wanted] == pytest.approx([1.7, 0.8])
    assert [line.met for line in outcome.wanted] == [True, False]


@pytest.mark.e2e
@needs_peers
def test_the_real_peers_answer_beside_the_real_service(model: BenchModel, tmp_path: Path) -> None:
    python = environment.python()
    files = peer_models(python, write_checkpoint, tmp_path)
    modules = {LLAMA_CPP: "llama_worker", OPENVINO: "genai_worker"}
    processes = {
        name: SideProcess.peer(python, module, files[name]) for name, module in modules.items()
    }
    plan = Plan(starts=1, rounds=2, clients=(1, 3), output=4)
    turns = Turns(allowed=math.inf)  # other tests compute meanwhile
    measured = at_once.measure(model, processes, plan, VOCAB, turns)
    assert set(measured.runs_on) == {OURS, LLAMA_CPP, OPENVINO}
    for clients in plan.clients:
        assert {name: len(found) for name, found in measured.turns.ms[str(clients)].items()} == (
            dict.fromkeys(measured.runs_on, 2)
        )
