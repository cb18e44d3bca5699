"""The limits of a run: gates for its exit status, objectives that define the knee, and goodput.

Gates and objectives are limits on figures of `record.summary`: maximum values. Gates judge the
whole run. There is no gate for refused requests, because an overloaded server should refuse. The
knee is the highest arrival rate at which a stage of the run still meets every objective. Goodput
has limits on single requests, and counts the requests within all of them.

A figure that was not measured misses its limit, so a run without answers misses its gates.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from record import Figures, Tally, summary

MEASURED = {*summary(Tally(), 0, 0)} - {"found_in"}  # figures that can have a limit

GATES: dict[str, float] = {"failed_share": 0.0, "latency_p95": 30.0}
OBJECTIVES: dict[str, float] = {
    "failed_share": 0.0,
    "refused_share": 0.01,
    "latency_p95": 30.0,
    "ttft_p95": 1.0,
}
GOODPUT = "ttft:1000 e2el:30000"
# The names in other LLM benchmarks, and ours.
_GOODPUT_TIMES = {"ttft": "ttft", "tpot": "tpot", "e2el": "latency"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure and its limit; `reason` says why a figure is missing."""

    name: str
    value: float | None
    limit: float
    reason: str = ""

    @property
    def good(self) -> bool:
        """Whether the figure is within the limit."""
        return self.value is not None and self.value <= self.limit

    @property
    def fault(self) -> str:
        """Why the limit is missed."""
        return (
            self.reason if self.value is None else f"{self.name} {self.value:.4g} > {self.limit:g}"
        )

    def __str__(self) -> str:
        """The verdict in one line."""
        if self.value is None:
            return f"{self.name} (at most {self.limit:g}): MISSED, {self.reason}"
        word = "kept" if self.good else "MISSED"
        return f"{self.name} {self.value:.4g} (at most {self.limit:g}): {word}"


def limits(base: Mapping[str, float], changes: Iterable[str]) -> dict[str, float]:
    """`base` with changes `name=value` applied; `name=` removes a limit.

    Raises:
        ValueError: a change does not have this form, or names no measured figure.
    """
    changed = dict(base)
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} is not NAME=LIMIT")
        if name not in MEASURED:
            near = get_close_matches(name, MEASURED, n=3)
            raise ValueError(f"{change!r}: no such figure; similar: {', '.join(near) or 'none'}")
        if value:
            changed[name] = _number(value, change)
        else:
            changed.pop(name, None)
    return changed


def goodput_limits(text: str) -> dict[str, float]:
    """Limits in seconds by name, from text such as `ttft:500 tpot:50 e2el:10000` (milliseconds).

    Raises:
        ValueError: the text does not have this form.
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
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{item!r} has no number")
    return number


def judge(figures: Figures, against: Mapping[str, float]) -> list[Verdict]:
    """The verdict on every limit."""
    reason = "no answer has it" if figures["answered"] else why_unanswered(figures)
    return [Verdict(name, figures[name], limit, reason) for name, limit in against.items()]


def why_unanswered(figures: Figures) -> str:
    """The outcomes of the requests of a run or stage without answers, in words."""
    what = {
        "refused": "refused (429)",
        "failed": "failed",
        "cancelled": "cancelled",
        "unsent": "not sent, as too many were in flight",
    }
    ends = [f"{figures[name]} {words}" for name, words in what.items() if figures[name]]
    return f"as nothing was answered: {', '.join(ends) or 'no request has ended'}"


def knee(stages: Iterable[Figures], objectives: Mapping[str, float]) -> Figures | None:
    """The last stage before the first that misses an objective; None if there is none."""
    best = None
    for figures in stages:
        if not figures["answered"] or not all(v.good for v in judge(figures, objectives)):
            break
        best = figures
    return best
