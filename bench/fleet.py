"""`python -m bench.fleet`: how many replicas a load takes, by simulation from measured times.

    python -m bench.fleet measure       serves TinyLlama's shape here with 1 to 4 clients at once
    python -m bench.fleet simulate      draws the page's table and plot from what was measured

The model. A replica has as many rows as requests were measured at once, and a queue of 32. With n
requests in its rows each goes on at the speed measured for n clients: T(1) / T(n) of its speed
alone, where T(n) is the mean time of a request when n are served (processor sharing). How much work
a request is, in seconds alone, is drawn from an exponential distribution around T(1): requests of
one length spread less. Requests arrive at random (Poisson). A request that finds rows and queue
full is refused and gone. Who gets a request is chosen at random, as a Service does; as the shorter
of two queues; or by the prompt's beginning, where a few beginnings are much more common
than others (Zipf's law). Networks, failures, starting replicas and prefix caches are left out.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

from bench.machine import describe
from bench.models import CACHE, tinyllama_pair
from bench.report import Table, write
from bench.server import Client, serving
from specops.config import Settings

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "sizing.png"
REPLICAS = (10, 100, 1000)
LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
QUEUE = 32
ROWS = 4
_REQUESTS_PER_REPLICA = 300
_LEAST_REQUESTS = 20_000
_WARM_SHARE = 0.6  # of the requests: they fill the empty replicas and queues, and do not count
_BEGINNINGS = 5000  # different ones of prompts
_PROMPT_WORDS, _NEW_TOKENS = 100, 64
_ROUNDS = 2
_SETTLE_SECONDS = 3.0  # until all clients are at it
_WORDS = ("class", "def", "return", "import", "value", "self", "raise", "yield", "while", "path")


# -- measured ----------------------------------------------------------------------------------


def measure(seconds: float, cache: Path) -> dict[str, list[float]]:
    """Seconds that a request takes, by the number of clients that ask one after the other.

    By Little's law from what is answered meanwhile: clients / requests per second. Two rounds, so
    that a disturbance shows.
    """
    target, draft = tinyllama_pair(_progress, "int4-128", cache)
    settings = Settings(target=str(target), draft=str(draft), rows=ROWS, cache_dir=cache / "caps")
    found: dict[str, list[float]] = {}
    with serving(settings) as (_, client):
        client.generate(_body(random.Random(0)))
        for _ in range(_ROUNDS):
            for clients in range(1, ROWS + 1):
                taken = _serve(client, clients, seconds)
                found.setdefault(str(clients), []).append(taken)
                _progress(f"{clients} clients: a request takes {taken:.2f} s")
    return found


def _serve(client: Client, clients: int, seconds: float) -> float:
    """Mean seconds of a request while so many are asking."""
    stop = threading.Event()

    def ask(seed: int) -> None:
        own, rng = Client(client.port), random.Random(seed)
        while not stop.is_set():
            own.generate(_body(rng))
        own.close()

    users = [threading.Thread(target=ask, args=(seed,)) for seed in range(clients)]
    for user in users:
        user.start()
    stop.wait(_SETTLE_SECONDS)
    name = "specops_generated_tokens_total"
    before, begin = client.metric(name), time.monotonic()
    stop.wait(seconds)
    rate = (client.metric(name) - before) / (time.monotonic() - begin) / _NEW_TOKENS
    stop.set()
    for user in users:
        user.join()
    return clients / rate


def _body(rng: random.Random) -> dict[str, Any]:
    prompt = " ".join(rng.choice(_WORDS) for _ in range(_PROMPT_WORDS))
    return {"prompt": prompt, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}


# -- simulated ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Replica:
    """Requests in rows, which share the speed, and requests that wait.

    Attributes:
        speeds: [n] how fast each of n requests goes on, as a share of its speed alone; [0] is 1.
        work: seconds alone that each request in a row still takes.
        waiting: (arrival, work) of those in the queue.
    """

    speeds: Sequence[float]
    work: list[tuple[float, float]] = field(default_factory=list)  # (left, arrival)
    waiting: deque[tuple[float, float]] = field(default_factory=deque)
    now: float = 0.0
    version: int = 0  # changes whenever a planned end is no longer right

    @property
    def load(self) -> int:
        """Requests here."""
        return len(self.work) + len(self.waiting)

    def advance(self, now: float) -> None:
        """Let time pass, in which nobody comes or goes."""
        done = (now - self.now) * self.speeds[len(self.work)]
        self.work = [(left - done, arrival) for left, arrival in self.work]
        self.now = now

    def offer(self, now: float, work: float) -> bool:
        """Take a request in, or refuse it."""
        self.advance(now)
        if len(self.work) < len(self.speeds) - 1:
            self.work.append((work, now))
        elif len(self.waiting) < QUEUE:
            self.waiting.append((now, work))
        else:
            return False
        self.version += 1
        return True

    def finish(self, now: float) -> float:
        """End the request with the least work left; the time it came."""
        self.advance(now)
        first = min(range(len(self.work)), key=lambda index: self.work[index][0])
        _, arrival = self.work.pop(first)
        if self.waiting:
            came, work = self.waiting.popleft()
            self.work.append((work, came))
        self.version += 1
        return arrival

    def next_end(self) -> float | None:
        """When the next request ends if nobody comes."""
        if not self.work:
            return None
        return self.now + min(self.work)[0] / self.speeds[len(self.work)]


class Fleet:
    """Replicas and the clock that they share.

    Attributes:
        replicas: all of them.
        answered: seconds that each request took, from its arrival to its end.
    """

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.answered: list[float] = []
        self._ends: list[tuple[float, int, int]] = []  # planned: time, replica, its version then

    def offer(self, index: int, now: float, work: float) -> bool:
        """Give a request to a replica; whether it was taken."""
        taken = self.replicas[index].offer(now, work)
        if taken:
            self._plan(index)
        return taken

    def run_until(self, now: float) -> None:
        """End the requests that end by then."""
        while self._ends and self._ends[0][0] <= now:
            end, index, version = heapq.heappop(self._ends)
            if version == self.replicas[index].version:
                self.answered.append(end - self.replicas[index].finish(end))
                self._plan(index)

    def _plan(self, index: int) -> None:
        if (end := self.replicas[index].next_end()) is not None:
            heapq.heappush(self._ends, (end, index, self.replicas[index].version))


Route = Callable[[Sequence[Replica], random.Random], int]


def at_random(replicas: Sequence[Replica], rng: random.Random) -> int:
    """Any replica: what a Service does."""
    return rng.randrange(len(replicas))


def shorter_of_two(replicas: Sequence[Replica], rng: random.Random) -> int:
    """The less busy of two replicas picked at random."""
    one, other = rng.randrange(len(replicas)), rng.randrange(len(replicas))
    return min(one, other, key=lambda index: replicas[index].load)


def by_beginning(replicas: Sequence[Replica], rng: random.Random) -> int:
    """The replica that the prompt's beginning belongs to; beginnings follow Zipf's law."""
    beginning = int(_BEGINNINGS ** rng.random())  # P(rank) ~ 1 / rank
    return random.Random(beginning).randrange(len(replicas))


ROUTES: dict[str, Route] = {
    "at random": at_random,
    "shorter of two": shorter_of_two,
    "by beginning": by_beginning,
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a fleet did with a load. Seconds."""

    replicas: int
    route: str
    load: float  # offered, as a share of what all replicas together can do
    requests_per_second: float  # that were answered
    refused: float  # share
    median: float
    p95: float
    p99: float


def capacity(times: Sequence[float]) -> float:
    """Requests per second of one replica with all its rows busy.

    Args:
        times: [n - 1] mean seconds of a request where n are served at once.
    """
    return max(count / seconds for count, seconds in enumerate(times, 1))


def simulate(
    times: Sequence[float], replicas: int, route: str, load: float, seed: int = 0
) -> Simulated:
    """Play a load on a fleet.

    Args:
        times: [n - 1] mean seconds of a request where n are served at once by one replica.
        replicas: how many there are.
        route: one of `ROUTES`.
        load: requests offered, as a share of what all replicas can do.
        seed: of the arrivals.
    """
    rng, choose = random.Random(seed), ROUTES[route]
    speeds = [1.0, *(times[0] / seconds for seconds in times)]
    fleet = Fleet([Replica(speeds) for _ in range(replicas)])
    rate = load * replicas * capacity(times)
    count = max(_LEAST_REQUESTS, _REQUESTS_PER_REPLICA * replicas)
    warm = int(_WARM_SHARE * count)
    refused, arrival, counted_from = 0, 0.0, 0.0
    for number in range(count):
        arrival += rng.expovariate(rate)
        fleet.run_until(arrival)
        if number == warm:
            fleet.answered.clear()
            counted_from = arrival
        taken = fleet.offer(choose(fleet.replicas, rng), arrival, rng.expovariate(1 / times[0]))
        refused += number >= warm and not taken
    latencies = sorted(fleet.answered)
    return Simulated(
        replicas=replicas,
        route=route,
        load=load,
        requests_per_second=len(latencies) / (arrival - counted_from),
        refused=refused / (count - warm),
        median=_quantile(latencies, 0.5),
        p95=_quantile(latencies, 0.95),
        p99=_quantile(latencies, 0.99),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# -- told --------------------------------------------------------------------------------------


def table(times: Sequence[float], runs: Sequence[Simulated]) -> Table:
    """The runs at some loads, side by side."""
    shown = [run for run in runs if run.load in (0.5, 0.8, 0.9, 1.2)]
    by_clients = ", ".join(f"{seconds:.2f}" for seconds in times)
    return Table(
        "A fleet, simulated",
        ("replicas", "load", "routing", "requests/s", "refused", "median s", "p95 s", "p99 s"),
        [
            (
                f"{run.replicas:,}",
                f"{run.load:.0%}",
                run.route,
                f"{run.requests_per_second:,.1f}",
                f"{run.refused:.1%}",
                f"{run.median:.1f}",
                f"{run.p95:.1f}",
                f"{run.p99:.1f}",
            )
            for run in shown
        ],
        notes=(
            f"one replica: {capacity(times):.3f} requests/s at most; a request of about "
            f"{_PROMPT_WORDS} words and {_NEW_TOKENS} new tokens takes {by_clients} s with 1 to "
            f"{len(times)} at once (TinyLlama-1.1B shape int4, measured)",
        ),
    )


def draw(runs: Sequence[Simulated], path: Path) -> None:
    """95th percentile and refusals by load, a line per fleet and routing."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(7.5, 6.5), sharex=True)
    colours = dict(zip(ROUTES, ("tab:blue", "tab:green", "tab:orange"), strict=True))
    styles = dict(zip(REPLICAS, (":", "--", "-"), strict=False))
    for route in ROUTES:
        for replicas in REPLICAS:
            line = [run for run in runs if (run.route, run.replicas) == (route, replicas)]
            loads = [run.load for run in line]
            how = {"color": colours[route], "linestyle": styles[replicas], "marker": "."}
            above.plot(
                loads, [run.p95 for run in line], label=f"{route}, {replicas:,} replicas", **how
            )
            below.plot(loads, [100 * run.refused for run in line], **how)
    above.set_ylabel("p95 of a request, seconds")
    above.set_yscale("log")
    above.legend(fontsize=7)
    below.set_ylabel("refused, %")
    below.set_xlabel("load offered, share of what the replicas can do")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Measure or simulate; 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("action", choices=("measure", "simulate"))
    parser.add_argument("--seconds", type=float, default=14.0, help="per client count and round")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args(arguments)
    kept = options.results / "service-times.json"
    if options.action == "measure":
        found = measure(options.seconds, options.cache)
        document = {"machine": asdict(describe()), "seconds_by_clients": found}
        kept.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return 0
    measured = json.loads(kept.read_text(encoding="utf-8"))
    times = [mean(seconds) for seconds in measured["seconds_by_clients"].values()]
    runs = []
    for replicas in REPLICAS:
        for route in ROUTES:
            runs += [simulate(times, replicas, route, load) for load in LOADS]
            _progress(f"{replicas} replicas, {route}")
    shown = table(times, runs)
    document = {"seconds_by_clients": times, "runs": [asdict(run) for run in runs]}
    write(options.results, "sizing", document, [shown])
    draw(runs, options.picture)
    print(shown.text())
    return 0


def _progress(text: str) -> None:
    print(f"fleet: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
