"""The results of a run, stage by stage: Locust's own statistics know only requests.

The figures have the field's definitions, the same for every protocol:

    latency   seconds from sending a request to the end of its answer (end-to-end)
    ttft      seconds from sending a request to its stream's first token
    tpot      seconds per output token after the first: (latency - ttft) / (output tokens - 1)
    itl       seconds between tokens: a chunk of n tokens counts n times an n-th of its gap
    speed     output tokens per second of one request, waiting included

Every request counts in the stage in which it was sent. With `--processes` each worker records its
own results and sends new ones to the master, which adds them up.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from shapes import Stage, stage_at

TIMES = ("latency", "ttft", "tpot", "itl", "speed")
COUNTS = ("answered", "refused", "failed", "cancelled", "unsent", "good")
COUNTS += ("input_tokens", "output_tokens")
QUANTILES = (0.5, 0.9, 0.95, 0.99)
_DIGITS = 3  # of a time: neighbours differ by 1 % at most, and a soak's tokens fit into memory

Spread = Counter[float]  # how often each value was observed
# By name. A share, mean or quantile of nothing is None: no number would be true.
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer.

    Attributes:
        latency: seconds.
        first: seconds to the first token; None if the answer came as a whole, or was empty.
        gaps: for each chunk after the first, seconds since the one before and its tokens.
    """

    text: str
    input_tokens: int
    output_tokens: int
    latency: float = 0.0
    first: float | None = None
    gaps: Sequence[tuple[float, int]] = ()

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None without such tokens."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.latency - self.first) / (self.output_tokens - 1)

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """Whether each time that was measured is within its limit."""
        times = {"latency": self.latency, "ttft": self.first, "tpot": self.tpot}
        return all((times[name] or 0.0) <= limit for name, limit in limits.items())


def token_gaps(
    chunks: Sequence[tuple[float, int | None, int]], total: int
) -> list[tuple[float, int]]:
    """Seconds between a stream's chunks, and each chunk's tokens, for all but the first chunk.

    A chunk is the time at which it came, its tokens if the protocol counts them, and its
    characters. Where it does not, the answer's `total` tokens are spread over the chunks by
    characters.
    """
    gaps = []
    characters = sum(length for _, _, length in chunks)
    counted = seen = 0
    previous = None
    for at, own, length in chunks:
        seen += length
        tokens = round(total * seen / characters) - counted if own is None else own
        counted += tokens
        if previous is None:
            previous = at
        elif tokens:
            gaps.append((at - previous, tokens))
            previous = at
    return gaps


@dataclass
class Tally:
    """The results of one stage; times in seconds, `itl` once for each token.

    `last` is the time, by `time.time()`, at which the last answer was complete.
    """

    answered: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    unsent: int = 0
    good: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    latency: Spread = field(default_factory=Counter)
    ttft: Spread = field(default_factory=Counter)
    tpot: Spread = field(default_factory=Counter)
    itl: Spread = field(default_factory=Counter)
    speed: Spread = field(default_factory=Counter)
    last: float = 0.0

    @property
    def sent(self) -> int:
        """Requests that have ended."""
        return self.answered + self.refused + self.failed + self.cancelled

    def count(self, reply: Reply, limits: Mapping[str, float]) -> None:
        """Count an answer that has just become complete."""
        self.answered += 1
        self.good += reply.keeps(limits)
        self.input_tokens += reply.input_tokens
        self.output_tokens += reply.output_tokens
        self.latency[_rounded(reply.latency)] += 1
        self.speed[_rounded(reply.output_tokens / reply.latency)] += 1
        if reply.first is not None:
            self.ttft[_rounded(reply.first)] += 1
        if reply.tpot is not None:
            self.tpot[_rounded(reply.tpot)] += 1
        for seconds, tokens in reply.gaps:
            self.itl[_rounded(seconds / tokens)] += tokens
        self.last = time.time()

    def data(self) -> dict[str, Any]:
        """The results as plain data; spreads as pairs, since messages have no numbers as keys."""
        spreads = {name: [*getattr(self, name).items()] for name in TIMES}
        return {name: getattr(self, name) for name in (*COUNTS, "last")} | spreads

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the results of another process, or of another stage, from `data`."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + other[name])
        for name in TIMES:
            getattr(self, name).update(dict(other[name]))
        self.last = max(self.last, other["last"])


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


class Recorder:
    """Tallies of all stages of one run, which began at `started`, by `time.time()`."""

    def __init__(self, stages: Sequence[Stage], started: float) -> None:
        self.stages = tuple(stages)
        self.started = started
        self.ended: float | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all results."""
        self.tallies = [Tally() for _ in self.stages]

    def restart(self) -> None:
        """Forget all results and count from now on, of a run with one stage."""
        self.clear()
        if len(self.stages) == 1:
            self.started = time.time()

    def stage(self, at: float) -> int:
        """The index of the stage at a time, by `time.time()`; after the last one, the last."""
        index = stage_at(self.stages, max(0.0, at - self.started))
        return len(self.stages) - 1 if index is None else index

    def at(self, sent: float) -> Tally:
        """The tally of the stage in which a request was sent."""
        return self.tallies[self.stage(sent)]

    def take(self) -> list[dict[str, Any]]:
        """Return all results as plain data, and begin again without them."""
        taken = [tally.data() for tally in self.tallies]
        self.clear()
        return taken

    def add(self, taken: Sequence[Mapping[str, Any]]) -> None:
        """Add the results that another process returned from `take`."""
        for tally, other in zip(self.tallies, taken, strict=True):
            tally.add(other)

    @property
    def requests(self) -> int:
        """Requests that have ended, in all stages."""
        return sum(tally.sent for tally in self.tallies)

    def rows(self) -> list[Figures]:
        """Figures of every stage that has begun, with its users or arrivals per second."""
        found = []
        begin = self.started
        for index, (stage, tally) in enumerate(zip(self.stages, self.tallies, strict=True)):
            if index and begin >= self._end():
                break
            seconds = min(stage.seconds, max(self._end(), tally.last) - begin)
            asked = {"seconds": seconds, "users": stage.users, "asked_per_second": stage.rate}
            found.append({**asked, **summary(tally, seconds)})
            begin += stage.seconds
        return found

    def whole(self) -> Figures:
        """Figures of the whole run, which ends with its last answer."""
        total = Tally()
        for tally in self.tallies:
            total.add(tally.data())
        seconds = max(self._end(), total.last) - self.started
        return {"seconds": seconds, **summary(total, seconds)}

    def _end(self) -> float:
        return time.time() if self.ended is None else self.ended


def quantile(values: Spread, q: float) -> float | None:
    """The smallest value that at least a share `q` does not exceed; None without values."""
    left = max(1, math.ceil(q * values.total()))
    for value in sorted(values):
        left -= values[value]
        if left <= 0:
            return value
    return None


def ratio(part: float, whole: float) -> float | None:
    """A share or a mean; None of nothing."""
    return part / whole if whole else None


def summary(tally: Tally, seconds: float) -> Figures:
    """Counts, shares, rates and quantiles of a tally that took `seconds`."""
    sent, seconds = tally.sent, max(seconds, 1e-9)
    figures: Figures = {name: getattr(tally, name) for name in COUNTS}
    figures["arrived_per_second"] = (sent + tally.unsent) / seconds
    figures["answered_per_second"] = tally.answered / seconds
    figures["good_per_second"] = tally.good / seconds
    figures["input_tokens_per_second"] = tally.input_tokens / seconds
    figures["output_tokens_per_second"] = tally.output_tokens / seconds
    for name in ("good", "refused", "failed", "cancelled"):
        figures[f"{name}_share"] = ratio(figures[name], sent)
    for name in TIMES:
        spread = getattr(tally, name)
        figures[f"{name}_count"] = spread.total()
        figures[f"{name}_mean"] = ratio(sum(v * n for v, n in spread.items()), spread.total())
        for q in QUANTILES:
            figures[f"{name}_p{q * 100:g}"] = quantile(spread, q)
    return figures


def as_csv(rows: Sequence[Figures]) -> str:
    """The stages as CSV; what was not measured is empty."""
    text = StringIO(newline="")
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report as JSON, and its stages as CSV beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    path.with_suffix(".csv").write_text(as_csv(report["stages"]), "utf-8", newline="")
