"""The statistics that every benchmark reports: a median with its quartiles, ratios in pairs.

Means are left out on purpose: on a shared machine one interrupted round moves them, and nothing
in the result shows it. Ratios are taken within a round, where both sides met the same machine.
"""

from __future__ import annotations

import math
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
        """Summarize values.

        Raises:
            ValueError: there are none.
        """
        if not values:
            raise ValueError("nothing was measured")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """The median and the ends of its confidence interval: two of the values, from the binomial law.

    Nothing is assumed of how the values are spread. Too few of them (below 6 for 95 %) bear no
    such interval; then it is the whole range.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("nothing was measured")
    ordered, count = sorted(values), len(values)
    outside, below = 0, 0.0  # how many values at each end are left out, and how likely that errs
    while True:
        below += math.comb(count, outside) / 2**count
        if below > (1 - confidence) / 2:
            break
        outside += 1
    place = max(outside - 1, 0)
    return statistics.median(ordered), ordered[place], ordered[count - 1 - place]


def ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Divide round by round.

    Raises:
        ValueError: the two do not have the same number of rounds.
    """
    return [value / base for value, base in zip(values, bases, strict=True)]


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """Return the items from place `by` on, then those before: nobody goes first every time."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]
