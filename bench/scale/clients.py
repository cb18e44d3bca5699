"""Clients that send a plan's requests, each one after the other, and what they see."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.scale.fleet import HOST
from bench.scale.traffic import Talk, body
from bench.serving.server import ServerError

_PATIENCE = 300.0  # seconds
_EVENT, _DONE = "data: ", "[DONE]"


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


def send(port: int, plan: Sequence[Sequence[Talk]]) -> Seen:
    """Send all of it, a thread for each client.

    Raises:
        ServerError: an answer was neither whole nor a refusal.
    """
    seen, problems = Seen(), list[Exception]()

    def run(talks: Sequence[Talk], odd: int) -> None:
        connection = http.client.HTTPConnection(HOST, port, timeout=_PATIENCE)
        try:
            for talk in talks:
                _converse(connection, talk, seen, odd)
        except (OSError, http.client.HTTPException, ValueError, ServerError) as error:
            problems.append(error)
        finally:
            connection.close()

    threads = [
        threading.Thread(target=run, args=(talks, number % 2)) for number, talks in enumerate(plan)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen.wall = time.perf_counter() - start
    if problems:
        raise ServerError(f"{len(problems)} clients failed, the first with {problems[0]!r}")
    return seen


def _converse(connection: http.client.HTTPConnection, talk: Talk, seen: Seen, odd: int) -> None:
    """All of a conversation; every second request streams."""
    prompt = talk.preamble
    for number, question in enumerate(talk.questions):
        prompt += question
        start = time.perf_counter()
        answer = _ask(connection, prompt, talk.session, stream=number % 2 == odd)
        if answer is None:
            seen.refused += 1
        else:
            seen.seconds.append(time.perf_counter() - start)
            prompt += answer + "\n"


def _ask(
    connection: http.client.HTTPConnection, prompt: str, session: str | None, *, stream: bool
) -> str | None:
    """An answer's text; None where it was refused for want of room."""
    headers = {"Content-Type": "application/json"}
    if session is not None:
        headers["X-Session-ID"] = session
    data = json.dumps(body(prompt, stream)).encode()
    connection.request("POST", "/generate", data, headers)
    response = connection.getresponse()
    text = response.read().decode()
    if response.status == http.HTTPStatus.TOO_MANY_REQUESTS:
        return None
    if response.status != http.HTTPStatus.OK:
        raise ServerError(f"HTTP {response.status}: {text}")
    if not stream:
        return str(json.loads(text)["generated_text"])
    events = [line.removeprefix(_EVENT) for line in text.splitlines() if line.startswith(_EVENT)]
    if len(events) < 2 or events[-1] != _DONE:
        raise ServerError(f"the stream ended early: {events[-1:]}")
    return str(json.loads(events[-2])["generated_text"])  # the last one has all of it
