"""The limits of a run: gates for its exit status, and objectives that define the knee.

A name is a figure of `record.summary`; its limit is the largest value that is still good. Gates
judge the whole run. Shed load is no gate, because under overload it is right. The knee is the
highest rate of arrivals at which a stage of the run still meets every objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Figures = Mapping[str, float]

GATES: dict[str, float] = {"failed_share": 0.0, "latency_p95": 30.0}
OBJECTIVES: dict[str, float] = {
    "failed_share": 0.0,
    "shed_share": 0.01,
    "latency_p95": 30.0,
    "ttft_p95": 1.0,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure against its limit."""

    name: str
    value: float
    limit: float

    @property
    def good(self) -> bool:
        """Whether the limit is kept."""
        return self.value <= self.limit

    def __str__(self) -> str:
        """One line for people."""
        word = "kept" if self.good else "MISSED"
        return f"{self.name} {self.value:.4g} (at most {self.limit:g}): {word}"


def limits(base: Mapping[str, float], changes: Iterable[str]) -> dict[str, float]:
    """`base` with `name=value` changes applied; `name=` takes a limit away.

    Raises:
        ValueError: a change is not of that form.
    """
    changed = dict(base)
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} is not NAME=LIMIT")
        if value:
            changed[name] = float(value)
        else:
            changed.pop(name, None)
    return changed


def judge(figures: Figures, against: Mapping[str, float]) -> list[Verdict]:
    """Every limit's verdict; a figure that does not exist (nothing was answered) is 0.

    Raises:
        ValueError: a limit is on a figure that is not measured.
    """
    if unknown := set(against) - set(figures):
        raise ValueError(f"no such figure: {', '.join(sorted(unknown))}")
    return [Verdict(name, figures[name], limit) for name, limit in against.items()]


def knee(stages: Iterable[Figures], objectives: Mapping[str, float]) -> Figures | None:
    """The last stage before the first one that misses an objective; None if that is the first."""
    best = None
    for figures in stages:
        if not figures["answered"] or not all(v.good for v in judge(figures, objectives)):
            break
        best = figures
    return best
