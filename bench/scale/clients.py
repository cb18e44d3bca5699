"""Clients of the replicas: they send the traffic, and time the way through the gateway."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from bench.scale.fleet import Fleet
from bench.scale.traffic import Talk, body
from bench.serving.load import Ask, Connection, Script, follow_all
from bench.tools.quiet import cpu_seconds
from bench.tools.report import Summary

_WARM = 20
# `/tokenize` costs next to nothing; a prompt is routed by its key.
PROBES: Mapping[str, Ask] = {
    "/tokenize": Ask("/tokenize", {"content": "def add(a, b):"}),
    "/generate, one token": Ask(
        "/generate",
        {"prompt": "def add(a, b):\n", "max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    ),
}


@dataclass(slots=True)
class Seen:
    """The clients' measurements.

    Attributes:
        seconds: from sending a request to the end of its answer.
        refused: number of answers with status 429; any other failure ends the benchmark.
        wall: seconds from the first request to the last answer.
    """

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    wall: float = 0.0


def send(port: int, plan: Sequence[Sequence[Talk]], seconds: float = 0.0) -> Seen:
    """Send all requests; each client sends its requests one after the other.

    Args:
        port: the gateway's port.
        plan: each client's talks.
        seconds: time over which a client's talks are spread evenly; 0: as fast as possible.

    Raises:
        ServerError: an answer was neither complete nor a refusal.
    """
    seen, start = Seen(), time.perf_counter()
    scripts = (_client(talks, seen, n % 2, start, seconds) for n, talks in enumerate(plan))
    asyncio.run(follow_all(port, scripts))
    seen.wall = time.perf_counter() - start
    return seen


def _client(
    talks: Sequence[Talk], seen: Seen, streams: int, start: float, seconds: float
) -> Script:
    """A client's conversations; `number % 2 == streams` are the requests that stream."""
    for turn, talk in enumerate(talks):
        pause = max(0.0, start + seconds * turn / len(talks) - time.perf_counter())
        prompt = talk.preamble
        headers = {} if talk.session is None else {"X-Session-ID": talk.session}
        for number, question in enumerate(talk.questions):
            prompt += question
            asked = body(prompt, number % 2 == streams)
            answer = yield Ask("/generate", asked, headers, 0.0 if number else pause)
            if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
                seen.refused += 1
                continue
            # The last event has the whole text.
            prompt += answer.checked().events[-1]["generated_text"] + "\n"
            seen.seconds.append(answer.seconds)


@dataclass(frozen=True, slots=True)
class Cost:
    """The gateway's cost for one kind of request, in seconds.

    Attributes:
        direct: a request sent directly to the replica.
        through: a request sent through the gateway.
        added: the difference, turn by turn.
        processor: Envoy's CPU time per request.
    """

    direct: Summary
    through: Summary
    added: Summary
    processor: float


def cost(running: Fleet, turns: int) -> dict[str, Cost]:
    """Ask the only replica directly and through the gateway, in turns, over open connections."""
    return {name: asyncio.run(_cost(running, ask, turns)) for name, ask in PROBES.items()}


async def _cost(running: Fleet, ask: Ask, turns: int) -> Cost:
    times: tuple[list[float], list[float]] = ([], [])
    processor = 0.0
    ways = Connection(running.ports[0]), Connection(running.port)
    for turn in range(-_WARM, turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            before = cpu_seconds(running.envoy)
            answer = (await ways[which].send(ask)).checked()
            if turn >= 0:
                times[which].append(answer.seconds)
                processor += (cpu_seconds(running.envoy) - before) if which else 0.0
    for way in ways:
        await way.close()
    added = [two - one for one, two in zip(*times, strict=True)]
    directly, through = map(Summary.of, times)
    return Cost(directly, through, Summary.of(added), processor / turns)
