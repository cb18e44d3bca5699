"""How Envoy chooses a replica by key: Maglev's table and the bound on a replica's load.

It makes the same choices as Envoy 1.40, bit for bit (`maglev_lb.cc` and
`thread_aware_lb_impl.cc` under `source/extensions/load_balancing_policies` there), for replicas of
equal weight.
`tests/bench/scale/test_envoy.py` compares them with the real Envoy's.

Maglev: Eisenbud et al., NSDI 2016. Bounded load: Mirrokni, Thorup and Zadimoghaddam, arXiv
1608.01350, with random jumps in place of linear probing: Chen, Coleman and Shrivastava, arXiv
1908.08762.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from xxhash import xxh64_intdigest

TABLE_SIZE = 65_537  # Envoy's default
FACTOR = 125  # `hash_balance_factor` in gateway/envoy.yaml


class Maglev:
    """The table from a key's hash to a replica, and the choice if that replica is full."""

    def __init__(self, addresses: Sequence[str], factor: int = FACTOR) -> None:
        """Make the table.

        Args:
            addresses: address of each replica, `HOST:PORT`.
            factor: percent of the mean load that a replica may have; 0: no bound.
        """
        self.addresses, self.factor = list(addresses), factor
        self._table = _table(self.addresses)

    def home(self, key: str) -> int:
        """The replica that a key belongs to, as a place in `addresses`."""
        return int(self._table[xxh64_intdigest(key.encode()) % TABLE_SIZE])

    def choose(self, key: str, running: Sequence[int], total: int) -> int:
        """The replica that a request with this key goes to.

        Args:
            key: the header's value.
            running: number of requests that each replica has.
            total: their sum.
        """
        home = self.home(key)
        if not self.factor or running[home] <= (slots := self._slots(total)):
            return home
        best = home
        for other in self._jumps(xxh64_intdigest(key.encode())):
            if running[other] <= slots:
                return other
            if running[other] < running[best]:
                best = other
        return best

    def _slots(self, total: int) -> int:
        """Most requests of a replica that may get another one."""
        slots = ((total + 1) * self.factor + 99) // 100
        return max(math.ceil(slots * (1.0 / len(self.addresses))), 1)

    def _jumps(self, value: int) -> Iterator[int]:
        """All replicas in an order that follows from the key's hash."""
        engine = np.random.MT19937()
        engine._legacy_seeding(value % (1 << 32))  # type: ignore[attr-defined]  # as std::mt19937
        places = list(range(len(self.addresses)))
        for place in range(len(places)):
            left = len(places) - place
            while (drawn := int(engine.random_raw()) // ((1 << 32) // left)) >= left:
                pass  # the last, partial stretch: drawn again
            places[place], places[place + drawn] = places[place + drawn], places[place]
            yield places[place]


def _table(addresses: Sequence[str]) -> np.ndarray:
    """[TABLE_SIZE]: replicas take turns, each takes the next free place of its own order."""
    table = np.full(TABLE_SIZE, -1, dtype=np.int32)
    order = sorted(range(len(addresses)), key=lambda place: addresses[place])
    steps = []
    for place in order:
        text = addresses[place].encode()
        skip = xxh64_intdigest(text, 1) % (TABLE_SIZE - 1) + 1
        steps.append([place, xxh64_intdigest(text) % TABLE_SIZE, skip])
    free, taken = TABLE_SIZE, bytearray(TABLE_SIZE)
    while free:
        for step in steps[:free]:
            place, at, skip = step
            while taken[at]:
                at = (at + skip) % TABLE_SIZE
            taken[at], table[at] = 1, place
            step[1] = (at + skip) % TABLE_SIZE
            free -= 1
    return table
