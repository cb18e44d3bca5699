"""Clients of the replicas: they send a plan's requests, and time the way through the gateway."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from bench.scale.fleet import Fleet
from bench.scale.traffic import Talk, body
from bench.serving.server import Client, RefusedError, events
from bench.tools.quiet import cpu_seconds
from bench.tools.report import Summary

_WARM = 20
# `/tokenize` needs next to nothing; a prompt takes the way by its key.
PROBES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "/tokenize": ("/tokenize", {"content": "def add(a, b):"}),
    "/generate, one token": (
        "/generate",
        {"prompt": "def add(a, b):\n", "max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    ),
}


@dataclass(slots=True)
class Seen:
    """What the clients saw.

    Attributes:
        seconds: from sending a request to the end of its answer.
        refused: number of answers with status 429; any other failure ends the benchmark.
        wall: seconds from the first request to the last answer.
    """

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    wall: float = 0.0


def send(port: int, plan: Sequence[Sequence[Talk]], seconds: float = 0.0) -> Seen:
    """Send all requests; each client sends its own one after the other, in a thread.

    Args:
        port: the port of the gateway.
        plan: each client's talks.
        seconds: a client's talks are spread evenly over this time, if answers come in time.

    Raises:
        ServerError: an answer was neither complete nor a refusal.
    """
    seen = Seen()

    def run(talks: Sequence[Talk], odd: int) -> None:
        with closing(Client(port)) as client:
            for number, talk in enumerate(talks):
                due = start + seconds * number / len(talks)
                time.sleep(max(0.0, due - time.perf_counter()))
                _converse(client, talk, seen, odd)

    start = time.perf_counter()
    with ThreadPoolExecutor(len(plan)) as threads:
        running = [threads.submit(run, talks, n % 2) for n, talks in enumerate(plan)]
    seen.wall = time.perf_counter() - start
    for client in running:
        client.result()
    return seen


def _converse(client: Client, talk: Talk, seen: Seen, odd: int) -> None:
    """Send a whole conversation; every second request streams."""
    prompt = talk.preamble
    headers = {} if talk.session is None else {"X-Session-ID": talk.session}
    for number, question in enumerate(talk.questions):
        prompt += question
        stream = number % 2 == odd
        start = time.perf_counter()
        try:
            response = client.post("/generate", body(prompt, stream), headers)
        except RefusedError as refused:
            if refused.status != HTTPStatus.TOO_MANY_REQUESTS:
                raise
            seen.refused += 1
            continue
        answer = events(response)[-1] if stream else json.loads(response.read())
        seen.seconds.append(time.perf_counter() - start)
        prompt += answer["generated_text"] + "\n"  # the last event has the whole text


@dataclass(frozen=True, slots=True)
class Cost:
    """What the gateway adds to one kind of request; seconds.

    Attributes:
        direct: of a request that goes straight to the replica.
        through: of a request through the gateway.
        added: through the gateway less directly, turn by turn.
        processor: Envoy's processor time for one request.
    """

    direct: Summary
    through: Summary
    added: Summary
    processor: float


def cost(running: Fleet, turns: int) -> dict[str, Cost]:
    """Ask the only replica directly and through the gateway in turns, over open connections."""
    return {name: _cost(running, *probe, turns) for name, probe in PROBES.items()}


def _cost(running: Fleet, path: str, body: Mapping[str, Any], turns: int) -> Cost:
    times: tuple[list[float], list[float]] = ([], [])
    processor = 0.0
    with closing(Client(running.ports[0])) as direct, closing(Client(running.port)) as through:
        for turn in range(-_WARM, turns):
            for which in (0, 1) if turn % 2 else (1, 0):
                before, start = cpu_seconds(running.envoy), time.perf_counter()
                (direct, through)[which].post(path, body).read()
                if turn >= 0:
                    times[which].append(time.perf_counter() - start)
                    processor += (cpu_seconds(running.envoy) - before) if which else 0.0
    added = [two - one for one, two in zip(*times, strict=True)]
    return Cost(*(Summary.of(found) for found in (*times, added)), processor / turns)
