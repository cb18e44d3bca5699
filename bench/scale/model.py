"""Replicas, their caches and their clients as a simulation, with Envoy's own choice between them.

Clients do as in `scale`: each asks the next question when it has an answer. A replica computes up
to eight requests at once, all equally fast. Only two ratios matter: the time of a prompt's token to
that of an answer's token, and the time of a pass over several rows to that over one. Clients make
no pauses, so the unit of time does not change the results.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.scale.envoy import Maglev
from bench.scale.traffic import OUTPUT, Talk, key

SLOTS = 8  # SPECOPS_SLOTS, by default
# Microseconds of the demo pair's passes (docs/architecture.md): 203 over one token, 456 over eight
# rows, 2,440 over a prompt's 96 tokens.
_MORE_ROWS = 0.18  # of a pass over one row, that each further row adds
_PROMPT_TOKEN = 0.125  # of a token of the answer


@dataclass(frozen=True, slots=True)
class Told:
    """The results.

    Attributes:
        cached: share of prompt tokens that were in the replica's cache.
        possible: this share if all replicas had one cache.
        requests: number of requests that each replica answered.
        at_home: share of requests that went to their key's replica.
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
    """A replica's cache: known preambles, and the tokens of each conversation."""

    preambles: set[str] = field(default_factory=set)
    said: dict[str, int] = field(default_factory=dict)

    def have(self, talk: Talk, preamble: int) -> int:
        """Number of cached tokens of a prompt. From now on its preamble is cached."""
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
    """A client's request: tokens of its prompt, its start, and its time on an idle replica."""

    client: int
    talk: Talk
    prompt: int
    begun: float
    alone: float


@dataclass(slots=True)
class _Replica:
    """Computes up to `SLOTS` requests at once. `clock` is the computing time that each got."""

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
        """Add a request at the clock's time."""
        if len(self.running) < SLOTS:
            heapq.heappush(self.running, (self.clock + job.alone, number, job))
        else:
            self.waiting.append((number, job))

    def finish(self) -> _Job:
        """Remove and return the request that is done; the next waiting one gets its slot."""
        _, _, job = heapq.heappop(self.running)
        if self.waiting:
            self.add(*self.waiting.popleft())
        self.answered += 1
        return job

    def next_end(self) -> float:
        """The time at which the first request is done, if no other comes."""
        return self.since + max(self.running[0][0] - self.clock, 0.0) / self._pace()


def _asks(talks: Sequence[Talk], tokens: Callable[[str], int]) -> Iterator[tuple[Talk, int, int]]:
    """A client's requests: the talk, tokens of its preamble, and of the whole prompt."""
    for talk in talks:
        preamble = said = tokens(talk.preamble)
        for question in talk.questions:
            prompt = said + tokens(question)
            yield talk, preamble, prompt
            said = prompt + OUTPUT + 1


class Simulation:
    """Replicas and clients, with the counts of what happens.

    Args:
        gateway: chooses a replica for each request.
        plan: each client's talks.
        tokens: counts the tokens of a text.
    """

    def __init__(
        self, gateway: Maglev, plan: Sequence[Sequence[Talk]], tokens: Callable[[str], int]
    ) -> None:
        self._gateway = gateway
        self._clients = [_asks(talks, tokens) for talks in plan]
        self._replicas = [_Replica() for _ in gateway.addresses]
        self._active, self._total = [0] * len(self._replicas), 0
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
        asked = next(self._clients[number], None)
        if asked is None:
            return
        talk, preamble, prompt = asked
        place = self._gateway.choose(route := key(talk), self._active, self._total)
        replica = self._replicas[place]
        known = replica.cache.have(talk, preamble)
        alone = _PROMPT_TOKEN * (prompt - known) + OUTPUT
        replica.pass_time(now)
        replica.add(self._asked, _Job(number, talk, prompt, now, alone))
        self._schedule(place)
        self._active[place] += 1
        self._total += 1
        self._asked += 1
        self._prompts += prompt
        self._cached += known
        self._possible += self._one.have(talk, preamble)
        self._at_home += place == self._gateway.home(route)

    def _answer(self, place: int, now: float) -> None:
        """End the first request of a replica."""
        replica = self._replicas[place]
        replica.pass_time(now)
        job = replica.finish()
        self._schedule(place)
        self._active[place] -= 1
        self._total -= 1
        self._slowdowns.append((now - job.begun) / job.alone)
        for cache in (replica.cache, self._one):
            cache.keep(job.talk, job.prompt + OUTPUT + 1)
        self._ask(job.client, now)

    def _schedule(self, place: int) -> None:
        """Note when a replica next ends a request; its earlier note becomes void."""
        replica = self._replicas[place]
        replica.version += 1
        if replica.running:
            heapq.heappush(self._ends, (replica.next_end(), place, replica.version))
