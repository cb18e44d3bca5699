"""What the gateway itself costs: the time that it adds to a request, and its processor time.

The same replica is asked directly and through the gateway in turns, by one client over connections
that stay open, with requests that need next to nothing: what is left is the way there and back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from bench.scale.fleet import Fleet
from bench.serving.server import Client
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
