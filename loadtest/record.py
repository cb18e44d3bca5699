"""The results of a run, stage by stage: Locust's own statistics have only the whole run.

Every request counts in the stage in which it was sent. With `--processes` each worker records its
own results and sends new ones to the master, which adds them up.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shapes import Stage, stage_at

TIMES = ("latency", "ttft", "itl")
COUNTS = ("answered", "shed", "failed", "tokens")
QUANTILES = (0.5, 0.95, 0.99)


@dataclass
class Tally:
    """The results of one stage; times in seconds, `itl` once for each token.

    `last` is the time, by `time.time()`, at which the last answer was complete.
    """

    answered: int = 0
    shed: int = 0
    failed: int = 0
    tokens: int = 0
    latency: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    last: float = 0.0

    def add(self, other: Mapping[str, Any]) -> None:
        """Add another process's results of this stage."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + other[name])
        for name in TIMES:
            getattr(self, name).extend(other[name])
        self.last = max(self.last, other["last"])


class Recorder:
    """Tallies of all stages of one run."""

    def __init__(self, stages: Sequence[Stage], time_scale: float, started: float) -> None:
        self.stages = tuple(stages)
        self.time_scale = time_scale
        self.started = started
        self.tallies = [Tally() for _ in stages]

    def at(self, sent: float) -> Tally:
        """The tally of the stage in which a request was sent, at `time.time()` seconds."""
        place = stage_at(self.stages, max(0.0, sent - self.started) / self.time_scale)
        return self.tallies[-1 if place is None else place]

    def take(self) -> list[dict[str, Any]]:
        """Return all results as plain data, and begin again without them."""
        taken = [asdict(tally) for tally in self.tallies]
        self.tallies = [Tally() for _ in self.stages]
        return taken

    def add(self, taken: Sequence[Mapping[str, Any]]) -> None:
        """Add the results that another process returned from `take`."""
        for tally, other in zip(self.tallies, taken, strict=True):
            tally.add(other)

    def rows(self, rate_scale: float) -> list[dict[str, float]]:
        """Figures of every stage, with its number of users or of arrivals per second."""
        found = []
        for stage, tally in zip(self.stages, self.tallies, strict=True):
            seconds = stage.seconds * self.time_scale
            rate = stage.users * rate_scale if stage.open_loop else 0.0
            asked = {"seconds": seconds, "users": stage.users, "asked_per_second": rate}
            found.append({**asked, **summary(tally, seconds)})
        return found

    def whole(self) -> dict[str, float]:
        """Figures of the whole run, which ends with its last answer."""
        total = Tally()
        for tally in self.tallies:
            total.add(asdict(tally))
        planned = sum(stage.seconds for stage in self.stages) * self.time_scale
        return summary(total, max(planned, total.last - self.started))


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share `q` does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0


def summary(tally: Tally, seconds: float) -> dict[str, float]:
    """Counts, shares, rates and quantiles of a tally that took `seconds`."""
    sent = tally.answered + tally.shed + tally.failed
    figures: dict[str, float] = {name: getattr(tally, name) for name in COUNTS}
    figures["arrived_per_second"] = sent / seconds
    figures["answered_per_second"] = tally.answered / seconds
    figures["tokens_per_second"] = tally.tokens / seconds
    figures["shed_share"] = tally.shed / sent if sent else 0.0
    figures["failed_share"] = tally.failed / sent if sent else 0.0
    for name in TIMES:
        for q in QUANTILES:
            figures[f"{name}_p{q * 100:g}"] = quantile(getattr(tally, name), q)
    return figures


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report as JSON, and its stages as CSV beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    with path.with_suffix(".csv").open("w", newline="") as lines:
        rows = csv.DictWriter(lines, report["stages"][0])
        rows.writeheader()
        rows.writerows(report["stages"])
