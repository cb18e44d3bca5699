"""Sends the same traffic to one, two and three replicas behind the gateway.

Each replica has its own prefix cache. If a gateway sent requests to any replica, every replica
would compute every conversation again. If it routed them by key alone, one replica would be full
while others idle. This benchmark shows whether the gateway avoids both, and what it costs.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.models import BenchModel
from bench.scale.clients import Cost, cost, send
from bench.scale.fleet import Cores, Fleet, cores, fleet
from bench.scale.traffic import OUTPUT, PREAMBLES, requests, talks
from bench.tools.quiet import cpu_seconds
from bench.tools.report import Outcome, Table, Target, progress

MIN_HITS = 0.9  # cached share of prompt tokens, relative to a single replica's
MAX_LOAD = 1.5  # requests of the busiest replica over the mean
MAX_ADDED, MAX_CORE = 1.0, 0.05  # milliseconds at the median, share of a core
_GENERATING = "/generate"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of talks by each of `clients`, at every number of replicas.

    Requests come as fast as they are answered. The largest number of replicas gets them once more,
    spread over `seconds`. `turns` measure the gateway's cost.
    """

    clients: int
    rounds: int
    turns: int
    seconds: float
    replicas: tuple[int, ...] = (1, 2, 3)


FULL = Plan(clients=9, rounds=20, turns=1000, seconds=60.0)
QUICK = Plan(clients=3, rounds=1, turns=10, seconds=2.0, replicas=(1, 2))


@dataclass(frozen=True, slots=True)
class Run:
    """The results of the traffic with one number of replicas.

    Attributes:
        seconds: from the first request to the last answer.
        requests: number of requests that each replica answered.
        tokens_per_second: generated tokens per second of all replicas.
        cached: share of prompt tokens from prefix caches.
        p50, p95: quantiles of a request's seconds.
        refused: number of answers with status 429.
        gateway: Envoy's CPU seconds per second.
        retried: number of requests that the gateway sent to more than one replica.
    """

    seconds: float
    requests: list[int]
    tokens_per_second: float
    cached: float
    p50: float
    p95: float
    refused: int
    gateway: float
    retried: int = 0

    @property
    def busiest(self) -> float:
        """Requests of the busiest replica over the mean."""
        return max(self.requests) * len(self.requests) / sum(self.requests)


@dataclass(frozen=True, slots=True)
class Measured:
    """All results.

    Attributes:
        plan: how much was measured.
        shared: whether replicas share one processor.
        runs: a run for each number of replicas.
        paced: the run spread over the plan's seconds.
        costs: the gateway's cost, by kind of request.
    """

    plan: Plan
    shared: bool
    runs: list[Run]
    paced: Run
    costs: Mapping[str, Cost]


def run(model: BenchModel, plan: Plan) -> Outcome:
    """Measure all numbers of replicas."""
    settings = replace(model.settings, prefix_cache="client")  # as served
    most = max(plan.replicas)
    pinned = cores(most)
    model.folder()  # prepare the weights before timing anything
    runs, costs = [], dict[str, Cost]()
    with _pinned(pinned):
        for size, seconds in (*((size, 0.0) for size in plan.replicas), (most, plan.seconds)):
            progress(f"{size} of {most} replicas")
            with tempfile.TemporaryDirectory(prefix="scale-") as folder:
                with fleet(settings, size, pinned, Path(folder)) as running:
                    if size == 1:
                        costs = cost(running, plan.turns)
                    found = _measure(running, plan, seconds)
                runs.append(_logged(found, running))
    *runs, paced = runs
    return outcome(model.title, Measured(plan, pinned.shared, runs, paced, costs))


@contextmanager
def _pinned(pinned: Cores) -> Iterator[None]:
    """Pin this process, which runs the clients, to their processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, pinned.clients)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(running: Fleet, plan: Plan, seconds: float) -> Run:
    names = ("requests", "prompt_tokens", "cached_prompt_tokens")
    counters = [f"specops_{name}_total" for name in names]
    before = [running.figures(name) for name in counters]
    processor = cpu_seconds(running.envoy)
    seen = send(running.port, talks(plan.clients, plan.rounds), seconds)
    processor = cpu_seconds(running.envoy) - processor
    asked, computed, cached = (
        [new - old for new, old in zip(running.figures(name), then, strict=True)]
        for name, then in zip(counters, before, strict=True)
    )
    p50, p95 = np.quantile(seen.seconds, (0.5, 0.95))
    return Run(
        seconds=seen.wall,
        requests=[int(count) for count in asked],
        tokens_per_second=OUTPUT * len(seen.seconds) / seen.wall,
        cached=sum(cached) / (sum(cached) + sum(computed)),
        p50=float(p50),
        p95=float(p95),
        refused=seen.refused,
        gateway=processor / seen.wall,
    )


def _logged(found: Run, ended: Fleet) -> Run:
    """The run, completed from the last rows of the gateway's log."""
    rows = [row for row in ended.log() if row["path"] == _GENERATING]
    retried = sum(int(row["tried"]) > 1 for row in rows[-sum(found.requests) :])
    return replace(found, retried=retried)


def outcome(title: str, measured: Measured) -> Outcome:
    """The tables and the targets."""
    tables = [_replicas(title, measured), _costs(measured)]
    return Outcome(asdict(measured), tables, targets=_targets(measured))


def _replicas(title: str, measured: Measured) -> Table:
    first, plan = measured.runs[0], measured.plan
    rows = [
        {
            "replicas": str(len(found.requests)),
            "seconds": f"{found.seconds:.0f}",
            "tok/s": f"{found.tokens_per_second:.0f}",
            "p50, ms": f"{found.p50 * 1e3:.0f}",
            "p95, ms": f"{found.p95 * 1e3:.0f}",
            "from caches": f"{found.cached:.3f}",
            "of one replica's": f"{found.cached / first.cached:.3f}",
            "busiest over mean": f"{found.busiest:.2f}",
            "429s": str(found.refused),
            "asked again": str(found.retried),
            "gateway, cores": f"{found.gateway:.4f}",
        }
        for found in (*measured.runs, measured.paced)
    ]
    count = requests(talks(plan.clients, plan.rounds))
    notes = (
        f"{count} requests from {plan.clients} clients, the same for every row, one at a time per "
        f"client, {OUTPUT} tokens each, half of them streamed: conversations of four turns with "
        f"X-Session-ID, and two questions without it between conversations; all begin with one of "
        f"{PREAMBLES} preambles",
        f"as fast as they are answered, in the last row spread over {plan.seconds:g} seconds",
        "each replica has one thread, and all share one processor, so more of them bring no more "
        "tokens here; clients and the gateway have the other processor"
        if measured.shared
        else "each replica has the same number of its own processors in every row; clients and the "
        "gateway have one more",
        "from caches: share of prompt tokens",
    )
    return Table.of(f"Replicas behind the gateway: {title}", rows, notes)


def _costs(measured: Measured) -> Table:
    rows = [
        (name, *(found.spread(scale=1e3) for found in (item.direct, item.through, item.added)),
         f"{item.processor * 1e6:.0f}")
        for name, item in measured.costs.items()
    ]  # fmt: skip
    note = f"{measured.plan.turns} turns, one client: directly, then through the gateway"
    columns = ("request", "directly, ms", "through, ms", "added, ms", "gateway's CPU time, µs")
    return Table("The gateway's cost per request", columns, rows, (note,))


def _targets(measured: Measured) -> list[Target]:
    single, lines = measured.runs[0], []
    for found in (*measured.runs[1:], measured.paced):
        what = f"{len(found.requests)} replicas, {found.seconds:.0f} s"
        kept = found.cached / single.cached
        lines += [
            Target(f"{what}: from caches, of one replica's", MIN_HITS, kept),
            Target(f"{what}: busiest over mean", MAX_LOAD, found.busiest, at_most=True),
        ]
    for name, item in measured.costs.items():
        added = 1e3 * item.added.median
        lines.append(Target(f"{name}: added at the median, ms", MAX_ADDED, added, at_most=True))
    most, paced = max(found.gateway for found in measured.runs), measured.paced.gateway
    share = "the gateway's share of a core"
    lines.append(Target(share, MAX_CORE, most, at_most=True))
    return [*lines, Target(f"{what}: {share}", MAX_CORE, paced, at_most=True)]
