"""What the gateway itself costs: the time that it adds to a request, and its processor time.

The same replica is asked directly and through the gateway in turns, by one client over connections
that stay open, with requests that need next to nothing: what is left is the way there and back.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.scale.fleet import HOST, Fleet
from bench.serving.server import ServerError
from bench.tools.quiet import cpu_seconds
from bench.tools.stats import Summary

_WARM = 20
# `/tokenize` goes wherever the least is to do; one token takes the way by key.
PROBES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "/tokenize": ("/tokenize", {"content": "def add(a, b):"}),
    "/generate, one token": (
        "/generate",
        {"prompt": "def add(a, b):\n", "max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    ),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What the gateway adds to one kind of request; seconds.

    Attributes:
        added: through the gateway less directly, turn by turn.
        processor: Envoy's processor time for one request.
    """

    direct: Summary
    through: Summary
    added: Summary
    processor: float


def cost(running: Fleet, turns: int) -> dict[str, Cost]:
    """Ask the first of the replicas, which has to be the only one."""
    if len(running.ports) != 1:
        raise ValueError("the same replica must answer both")
    return {
        name: _cost(running, path, json.dumps(body).encode(), turns)
        for name, (path, body) in PROBES.items()
    }


def _cost(running: Fleet, path: str, data: bytes, turns: int) -> Cost:
    direct, through = (
        http.client.HTTPConnection(HOST, port) for port in (running.ports[0], running.port)
    )
    times: tuple[list[float], list[float]] = ([], [])
    try:
        for _ in range(_WARM):
            _ask(direct, path, data)
            _ask(through, path, data)
        processor = 0.0
        for turn in range(turns):
            for which in (0, 1) if turn % 2 else (1, 0):
                before = cpu_seconds(running.envoy)
                times[which].append(_ask((direct, through)[which], path, data))
                processor += (cpu_seconds(running.envoy) - before) if which else 0.0
    finally:
        direct.close()
        through.close()
    added = [two - one for one, two in zip(*times, strict=True)]
    return Cost(*(Summary.of(found) for found in (*times, added)), processor / turns)


def _ask(connection: http.client.HTTPConnection, path: str, data: bytes) -> float:
    start = time.perf_counter()
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    seconds = time.perf_counter() - start
    if response.status != http.HTTPStatus.OK:
        raise ServerError(f"HTTP {response.status}: {text.decode(errors='replace')}")
    return seconds
