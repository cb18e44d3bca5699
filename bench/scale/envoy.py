"""How Envoy chooses a replica by key: Maglev's table and the bound on a replica's load.

The same choices as Envoy 1.40's, bit for bit (`maglev_lb.cc` and `thread_aware_lb_impl.cc` under
`source/extensions/load_balancing_policies` there), for replicas of equal weight.
`tests/bench/scale/test_envoy.py` holds them against the real Envoy's.

Maglev: Eisenbud et al., NSDI 2016. Bounded load: Mirrokni, Thorup and Zadimoghaddam, arXiv
1608.01350, with random jumps in place of linear probing: Chen, Coleman and Shrivastava, arXiv
1908.08762. The hash is xxHash64, for texts shorter than 32 bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import numpy as np

TABLE_SIZE = 65_537  # Envoy's default
FACTOR = 125  # `hash_balance_factor` in gateway/envoy.yaml
_MASK = (1 << 64) - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_LONG = 32  # bytes: longer texts are hashed in another way


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _MASK


def xxhash64(data: bytes, seed: int = 0) -> int:
    """The hash of fewer than 32 bytes: all that addresses and keys have.

    Raises:
        ValueError: the text is longer.
    """
    if len(data) >= _LONG:
        raise ValueError(f"{len(data)} bytes, where {_LONG - 1} are the most")
    value, place = (seed + _P5 + len(data)) & _MASK, 0
    while place + 8 <= len(data):
        (word,) = struct.unpack_from("<Q", data, place)
        word = _rotated(word * _P2 & _MASK, 31) * _P1 & _MASK
        value = (_rotated(value ^ word, 27) * _P1 + _P4) & _MASK
        place += 8
    if place + 4 <= len(data):
        (word,) = struct.unpack_from("<I", data, place)
        value = (_rotated(value ^ word * _P1 & _MASK, 23) * _P2 + _P3) & _MASK
        place += 4
    for byte in data[place:]:
        value = _rotated(value ^ byte * _P5 & _MASK, 11) * _P1 & _MASK
    value = (value ^ value >> 33) * _P2 & _MASK
    value = (value ^ value >> 29) * _P3 & _MASK
    return value ^ value >> 32


class Maglev:
    """The table from a key's hash to a replica, and what happens where that one has its fill."""

    def __init__(self, addresses: Sequence[str], factor: int = FACTOR) -> None:
        """Make the table.

        Args:
            addresses: each replica's, `HOST:PORT`.
            factor: percent of the mean load that a replica may have; 0: no bound.
        """
        self.addresses, self.factor = list(addresses), factor
        self._table = _table(self.addresses)

    def home(self, key: str) -> int:
        """The replica that a key belongs to, as a place in `addresses`."""
        return int(self._table[xxhash64(key.encode()) % TABLE_SIZE])

    def choose(self, key: str, running: Sequence[int], total: int) -> int:
        """The replica that a request with this key goes to.

        Args:
            key: the header's value.
            running: requests that each replica has.
            total: their sum.
        """
        home = self.home(key)
        if not self.factor or running[home] <= (slots := self._slots(total)):
            return home
        best = home
        for other in self._jumps(xxhash64(key.encode())):
            if running[other] <= slots:
                return other
            if running[other] < running[best]:
                best = other
        return best

    def _slots(self, total: int) -> int:
        """How many requests a replica may have before it is passed over."""
        slots = ((total + 1) * self.factor + 99) // 100
        return max(math.ceil(slots * (1.0 / len(self.addresses))), 1)

    def _jumps(self, value: int) -> Iterator[int]:
        """All replicas in an order that the key's hash decides, always the same one."""
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
        skip = xxhash64(text, 1) % (TABLE_SIZE - 1) + 1
        steps.append([place, xxhash64(text) % TABLE_SIZE, skip])
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
