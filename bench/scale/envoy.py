"""To which replica a key belongs in Envoy: Maglev's table (Eisenbud et al., NSDI 2016).

The table is Envoy 1.40's, bit for bit, for replicas of equal weight (`maglev_lb.cc` under
`source/extensions/load_balancing_policies` there). `tests/bench/scale/test_envoy.py` compares it
with the real Envoy.
"""

from collections.abc import Sequence

import numpy as np
from xxhash import xxh64_intdigest

TABLE_SIZE = 65_537  # Envoy's default


class Maglev:
    """The table from a key's hash to a replica. `addresses` are `HOST:PORT` of each replica."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self._table = _table(self.addresses)

    def home(self, key: str) -> int:
        """The replica that a key belongs to, as an index of `addresses`."""
        return int(self._table[xxh64_intdigest(key.encode()) % TABLE_SIZE])


def _table(addresses: Sequence[str]) -> np.ndarray:
    """[TABLE_SIZE]: replicas take turns, each takes the next free entry in an order of its own."""
    table = np.full(TABLE_SIZE, -1, dtype=np.int32)
    order = sorted(range(len(addresses)), key=lambda index: addresses[index])
    steps = []
    for index in order:
        text = addresses[index].encode()
        skip = xxh64_intdigest(text, 1) % (TABLE_SIZE - 1) + 1
        steps.append([index, xxh64_intdigest(text) % TABLE_SIZE, skip])
    free, taken = TABLE_SIZE, bytearray(TABLE_SIZE)
    while free:
        for step in steps[:free]:
            index, at, skip = step
            while taken[at]:
                at = (at + skip) % TABLE_SIZE
            taken[at], table[at] = 1, index
            step[1] = (at + skip) % TABLE_SIZE
            free -= 1
    return table
