"""Replicas, their caches and their clients as a simulation, with Envoy's own choice between them.

Clients are as measured: each asks the next question when it has an answer. A replica computes up to
eight requests at once, all equally fast. Only how long a prompt's token takes beside a token of the
answer matters, and what a pass over several rows takes beside one over one: with no pauses in
between, the unit of time changes nothing of what is told here.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.scale.envoy import Maglev
from bench.scale.traffic import OUTPUT, Talk, key

SLOTS = 8  # SPECOPS_SLOTS, by default
# Microseconds of the demo pair's passes (docs/architecture.md): 203 over one token, 456 over eight
# rows, 2,440 over a prompt's 96 tokens.
_MORE_ROWS = 0.18  # of a pass over one row, that each further row adds
_PROMPT_TOKEN = 0.125  # of a token of the answer

# Which replica a key's request goes to: by the key, what runs on each, and the sum of that.
Choice = Callable[[str, Sequence[int], int], int]


@dataclass(frozen=True, slots=True)
class Told:
    """What came out.

    Attributes:
        cached: share of prompt tokens that a replica had already.
        possible: that share if all replicas had one cache.
        requests: that each replica answered.
        at_home: share of requests that went where their key belongs.
        slowdown: 95th percentile of a request's time over its time on an idle replica.
    """

    cached: float
    possible: float
    requests: list[int]
    at_home: float
    slowdown: float

    @property
    def busiest(self) -> float:
        """The most requests of a replica over the mean."""
        return max(self.requests) * len(self.requests) / sum(self.requests)


@dataclass(slots=True)
class _Cache:
    """What a replica remembers: tokens of preambles, and of conversations with their preamble."""

    preambles: set[str] = field(default_factory=set)
    said: dict[str, int] = field(default_factory=dict)

    def have(self, talk: Talk, preamble: int) -> int:
        """How many tokens of its prompt are there; from now on the preamble is."""
        known = self.said.get(
            talk.session or "", preamble if talk.preamble in self.preambles else 0
        )
        self.preambles.add(talk.preamble)
        return known

    def keep(self, talk: Talk, tokens: int) -> None:
        """Remember a conversation as far as it has come."""
        if talk.session is not None:
            self.said[talk.session] = tokens


@dataclass(slots=True)
class _Job:
    """A request: whose it is, how far its conversation is, what is left to compute."""

    client: int
    prompt: int  # tokens
    begun: float
    alone: float
    end: float = 0.0  # the replica's work clock at which it is done


@dataclass(slots=True)
class _Replica:
    """Up to `SLOTS` requests at once, the others wait. `clock` counts what each of them got."""

    cache: _Cache = field(default_factory=_Cache)
    running: list[tuple[float, int, _Job]] = field(default_factory=list)
    waiting: deque[tuple[int, _Job]] = field(default_factory=deque)
    clock: float = 0.0
    since: float = 0.0
    answered: int = 0
    version: int = 0

    def _pace(self) -> float:
        return 1 / (1 + _MORE_ROWS * (len(self.running) - 1))

    def pass_time(self, now: float) -> None:
        """Bring the clock to `now`."""
        if self.running:
            self.clock += (now - self.since) * self._pace()
        self.since = now

    def add(self, number: int, job: _Job) -> None:
        """Take a request on; the clock stands at now."""
        if len(self.running) < SLOTS:
            job.end = self.clock + job.alone
            heapq.heappush(self.running, (job.end, number, job))
        else:
            self.waiting.append((number, job))

    def finish(self) -> _Job:
        """The request that is done now; the next that waits has its slot."""
        _, _, job = heapq.heappop(self.running)
        if self.waiting:
            self.add(*self.waiting.popleft())
        self.answered += 1
        return job

    def next_end(self) -> float:
        """When the first of them is done, if none comes."""
        return self.since + max(self.running[0][0] - self.clock, 0.0) / self._pace()


@dataclass(slots=True)
class _Client:
    talks: Sequence[Talk]
    place: int = 0
    turn: int = 0
    said: int = 0  # tokens of the conversation so far


def simulate(
    size: int,
    plan: Sequence[Sequence[Talk]],
    choose: Choice,
    tokens: Callable[[str], int],
    home: Callable[[str], int],
) -> Told:
    """Send a plan's requests to so many replicas.

    Args:
        size: replicas.
        plan: what each client asks.
        choose: the gateway.
        tokens: how many a text has.
        home: where a key belongs.
    """
    return _Run(size, plan, choose, tokens, home).told()


class _Run:
    """Replicas, clients, and what is counted meanwhile."""

    def __init__(
        self,
        size: int,
        plan: Sequence[Sequence[Talk]],
        choose: Choice,
        tokens: Callable[[str], int],
        home: Callable[[str], int],
    ) -> None:
        self._choose, self._tokens, self._home = choose, tokens, home
        self._replicas = [_Replica() for _ in range(size)]
        self._clients = [_Client(talks) for talks in plan]
        self._active, self._total = [0] * size, 0
        self._ends: list[tuple[float, int, int]] = []  # when, replica, its version then
        self._one = _Cache()
        self._asked = self._prompts = self._cached = self._possible = self._at_home = 0
        self._slowdowns: list[float] = []

    def told(self) -> Told:
        """Run until every client has every answer."""
        for number in range(len(self._clients)):
            self._ask(number, 0.0)
        while self._ends:
            now, place, version = heapq.heappop(self._ends)
            if version == self._replicas[place].version:
                self._answer(place, now)
        return Told(
            self._cached / self._prompts,
            self._possible / self._prompts,
            [replica.answered for replica in self._replicas],
            self._at_home / self._asked,
            float(np.quantile(self._slowdowns, 0.95)),
        )

    def _ask(self, number: int, now: float) -> None:
        """Send a client's next question, if it has one."""
        client = self._clients[number]
        if client.turn == len(client.talks[client.place].questions):
            client.place, client.turn = client.place + 1, 0
        if client.place == len(client.talks):
            return
        talk = client.talks[client.place]
        preamble = self._tokens(talk.preamble)
        client.said = client.said if client.turn else preamble
        prompt = client.said + self._tokens(talk.questions[client.turn])
        route = key(talk)
        place = self._choose(route, self._active, self._total)
        replica = self._replicas[place]
        known = replica.cache.have(talk, preamble)
        alone = _PROMPT_TOKEN * (prompt - known) + OUTPUT
        replica.pass_time(now)
        replica.add(self._asked, _Job(number, prompt, now, alone))
        self._schedule(place)
        self._active[place] += 1
        self._total += 1
        self._asked += 1
        self._prompts += prompt
        self._cached += known
        self._possible += self._one.have(talk, preamble)
        self._at_home += place == self._home(route)

    def _answer(self, place: int, now: float) -> None:
        """The next request of a replica is done."""
        replica = self._replicas[place]
        replica.pass_time(now)
        job = replica.finish()
        self._schedule(place)
        self._active[place] -= 1
        self._total -= 1
        self._slowdowns.append((now - job.begun) / job.alone)
        client = self._clients[job.client]
        client.said, client.turn = job.prompt + OUTPUT + 1, client.turn + 1
        for cache in (replica.cache, self._one):
            cache.keep(client.talks[client.place], client.said)
        self._ask(job.client, now)

    def _schedule(self, place: int) -> None:
        """Note when a replica is next done with a request; what was noted before is void."""
        replica = self._replicas[place]
        replica.version += 1
        if replica.running:
            heapq.heappush(self._ends, (replica.next_end(), place, replica.version))


def by_key(table: Maglev) -> Choice:
    """As the gateway does it."""
    return table.choose


def least_of_two(seed: int = 0) -> Choice:
    """Envoy's least request: the one with less to do of two at random."""
    chance = random.Random(seed)

    def choose(_: str, active: Sequence[int], __: int) -> int:
        one, other = (chance.randrange(len(active)) for _ in range(2))
        return one if active[one] <= active[other] else other

    return choose
