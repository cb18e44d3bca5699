"""Clients that send a plan's requests, each one after the other, and what they see."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from http import HTTPStatus

from bench.scale.traffic import Talk, body
from bench.serving.server import Client, RefusedError, events


@dataclass(slots=True)
class Seen:
    """What came back.

    Attributes:
        seconds: from sending a request to its answer's end.
        refused: answers of 429; what else fails ends the benchmark.
        wall: seconds from the first request to the last answer.
    """

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    wall: float = 0.0


def send(port: int, plan: Sequence[Sequence[Talk]], seconds: float = 0.0) -> Seen:
    """Send all of it, a thread for each client.

    Args:
        seconds: over which a client's talks are spread evenly, as far as answers come in time.

    Raises:
        ServerError: an answer was neither whole nor a refusal.
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
    """All of a conversation; every second request streams."""
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
        prompt += answer["generated_text"] + "\n"  # the last event has all of it
