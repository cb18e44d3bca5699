"""The statistics that every benchmark reports: a median with its quartiles, ratios in pairs.

Means are left out on purpose: on a shared machine one interrupted round moves them, and nothing
in the result shows it. Ratios are taken within a round, where both sides met the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and quartiles of `count` values."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarize values."""
        if not values:
            raise ValueError("nothing was measured")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


def ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Divide round by round."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """Return the items from place `by` on, then those before: each is first in its turn."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]
