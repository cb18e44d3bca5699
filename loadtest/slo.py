"""The limits of a run: gates for its exit status, objectives that define the knee, and goodput.

Gates and objectives are limits on figures of `record.summary`; a limit is the largest value that is
still good. Gates judge the whole run. Refused requests are no gate, because under overload it is
right to refuse. The knee is the highest rate of arrivals at which a stage of the run still meets
every objective. Goodput has limits on single requests: it counts those that keep all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Figures = Mapping[str, float]

GATES: dict[str, float] = {"failed_share": 0.0, "latency_p95": 30.0}
OBJECTIVES: dict[str, float] = {
    "failed_share": 0.0,
    "refused_share": 0.01,
    "latency_p95": 30.0,
    "ttft_p95": 1.0,
}
GOODPUT = "ttft:1000 e2el:30000"
# The names that other benchmarks of LLM servers use, and ours.
_GOODPUT_TIMES = {"ttft": "ttft", "tpot": "tpot", "e2el": "latency"}


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
            changed[name] = _number(value, change)
        else:
            changed.pop(name, None)
    return changed


def goodput_limits(text: str) -> dict[str, float]:
    """Seconds by name of a request's time, from `ttft:500 tpot:50 e2el:10000` in milliseconds.

    Raises:
        ValueError: the text is not of that form.
    """
    found = {}
    for item in text.replace(",", " ").split():
        name, _, value = item.partition(":")
        if name not in _GOODPUT_TIMES:
            raise ValueError(f"{item!r} is not NAME:MILLISECONDS with ttft, tpot or e2el")
        found[_GOODPUT_TIMES[name]] = _number(value, item) / 1000
    return found


def _number(value: str, item: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{item!r} has no number") from None


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
