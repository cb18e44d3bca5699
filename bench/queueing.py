"""A fleet of replicas as queues: who takes a request, how long it takes, who is refused.

A replica has as many slots as requests were measured at once, and a queue of 32. With n requests in
its slots each goes on at the speed measured for n clients: T(1) / T(n) of its speed alone, where
T(n) is the mean time of a request when n are served (processor sharing). How much work a request
is, in seconds alone, is drawn from an exponential distribution around T(1): requests of one length
spread less. Requests arrive at random (Poisson). A request that finds slots and queue full is
refused and gone. Who gets a request is chosen at random, as a Service does; as the shorter of two
queues; or by the prompt's beginning, where a few beginnings are much more common than others
(Zipf's law). Networks, failures, starting replicas and prefix caches are left out.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

QUEUE = 32
_REQUESTS_PER_REPLICA = 300
_LEAST_REQUESTS = 20_000
_WARM_SHARE = 0.6  # of the requests: they fill the empty replicas and queues, and do not count
_BEGINNINGS = 5000  # different ones of prompts


@dataclass(slots=True)
class Replica:
    """Requests in slots, which share the speed, and requests that wait.

    Attributes:
        speeds: [n] how fast each of n requests goes on, as a share of its speed alone; [0] is 1.
        work: seconds alone that each request in a slot still takes.
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
    """Requests per second of one replica with all its slots busy.

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
