"""The limits of a run: gates for its exit status, objectives that define the knee, and goodput.

Gates and objectives are limits on figures of `record.summary`; a limit is the largest value that is
still good. Gates judge the whole run. Refused requests are no gate, because under overload it is
right to refuse. The knee is the highest rate of arrivals at which a stage of the run still meets
every objective. Goodput has limits on single requests: it counts those that keep all of them.

Nothing keeps a limit on a figure that was not measured: a run without answers misses its gates.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from record import Figures, Tally, summary

MEASURED = {*summary(Tally(), 0, 0)} - {"found_in"}  # what can have a limit

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
    """One figure against its limit; `reason` says why there is none."""

    name: str
    value: float | None
    limit: float
    reason: str = ""

    @property
    def good(self) -> bool:
        """Whether the limit is kept."""
        return self.value is not None and self.value <= self.limit

    @property
    def fault(self) -> str:
        """Why the limit is not kept."""
        return (
            self.reason if self.value is None else f"{self.name} {self.value:.4g} > {self.limit:g}"
        )

    def __str__(self) -> str:
        """One line for people."""
        if self.value is None:
            return f"{self.name} (at most {self.limit:g}): MISSED, {self.reason}"
        word = "kept" if self.good else "MISSED"
        return f"{self.name} {self.value:.4g} (at most {self.limit:g}): {word}"


def limits(base: Mapping[str, float], changes: Iterable[str]) -> dict[str, float]:
    """`base` with `name=value` changes applied; `name=` takes a limit away.

    Raises:
        ValueError: a change is not of that form, or on a figure that is not measured.
    """
    changed = dict(base)
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"{change!r} is not NAME=LIMIT")
        if name not in MEASURED:
            near = get_close_matches(name, MEASURED, n=3)
            raise ValueError(f"{change!r}: no such figure; near it: {', '.join(near) or 'none'}")
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
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{item!r} has no number")
    return number


def judge(figures: Figures, against: Mapping[str, float]) -> list[Verdict]:
    """Every limit's verdict."""
    reason = "no answer has it" if figures["answered"] else why_unanswered(figures)
    return [Verdict(name, figures[name], limit, reason) for name, limit in against.items()]


def why_unanswered(figures: Figures) -> str:
    """What became of the requests of a run or stage without answers."""
    what = {
        "refused": "refused (429)",
        "failed": "failed",
        "cancelled": "cancelled",
        "unsent": "not sent, as too many were in flight",
    }
    ends = [f"{figures[name]} {words}" for name, words in what.items() if figures[name]]
    return f"as nothing was answered: {', '.join(ends) or 'no request has ended'}"


def knee(stages: Iterable[Figures], objectives: Mapping[str, float]) -> Figures | None:
    """The last stage before the first one that misses an objective; None if that is the first."""
    best = None
    for figures in stages:
        if not figures["answered"] or not all(v.good for v in judge(figures, objectives)):
            break
        best = figures
    return best
