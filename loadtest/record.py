"""The results of a run, stage by stage: Locust's own statistics know only requests.

The figures have the field's definitions, the same for every protocol:

    latency   seconds from sending a request to the end of its answer (end-to-end)
    ttft      seconds from sending a request to its stream's first token
    tpot      seconds per output token after the first: (latency - ttft) / (output tokens - 1)
    itl       seconds between tokens: a chunk of n tokens counts n times an n-th of its gap
    speed     output tokens per second of one request, waiting included
    slowdown  ttft over the seconds that the prompt would take alone (`prefill.py`)
    ttft_*    ttft of prompts up to so many tokens, and of longer ones

Every request counts in the stage in which it was sent. A stage's rates of answers and tokens count
the seconds in which its requests were: from its start to the last of their ends. With `--processes`
each worker records its own results and sends new ones to the master, which adds them up.
"""

import csv
import json
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from io import StringIO
from pathlib import Path
from typing import Any

from shapes import Stage, stage_at

PROMPT_SIZES = (128, 512, 2048)
SIZES = (*(f"ttft_to_{size}" for size in PROMPT_SIZES), f"ttft_above_{PROMPT_SIZES[-1]}")
TIMES = ("latency", "ttft", "tpot", "itl", "speed", "slowdown", *SIZES)
ENDS = ("answered", "refused", "failed", "cancelled")  # what becomes of a request that was sent
# By the second of the run: output tokens as they came, and times to the first token.
SERIES = ("tokens_at", "ttft_at")
QUANTILES = (0.5, 0.9, 0.95, 0.99)
_DIGITS = 3  # of a time: neighbours differ by 1 % at most, and a soak's tokens fit into memory

Spread = Counter[Any]  # how often each value was observed
# By name. A share, mean or quantile of nothing is None: no number would be true.
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer.

    Attributes:
        latency: seconds.
        first: seconds to the first token; None if the answer came as a whole, or was empty.
        gaps: for each chunk after the first, seconds since the one before and its tokens.
        cached_tokens: input tokens that the API knew from earlier requests; None: it does not say.
        passes: the target's after the first token; None: it does not say.
        found_in: accepted draft tokens, by where they were found; empty where it does not say.
        alone: seconds that its prompt would take alone; None where nobody knows.
    """

    text: str
    input_tokens: int
    output_tokens: int
    latency: float = 0.0
    first: float | None = None
    gaps: Sequence[tuple[float, int]] = ()
    cached_tokens: int | None = None
    passes: int | None = None
    found_in: Mapping[str, int] = field(default_factory=dict)
    alone: float | None = None

    @property
    def slowdown(self) -> float | None:
        """Time to the first token over that of the same prompt alone; None where not known."""
        return self.first / self.alone if self.first is not None and self.alone else None

    @property
    def size(self) -> str:
        """The one of `SIZES` to which its prompt belongs."""
        return SIZES[bisect_left(PROMPT_SIZES, self.input_tokens)]

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

    Attributes:
        repeated: prompts that were sent before in the run.
        cut: requests that were longer than the model allows.
        prompts: digests of prompts that were not sent before, until they are handed over.
        told_tokens, cached_tokens: of answers that tell, their input tokens, and those cached.
        passes, pass_tokens: of answers that tell, passes, and tokens after the first.
        user_seconds: of closed-loop users, summed up.
        started: the time at which the run began, by `time.time()`.
        last: likewise that at which the last request ended.
    """

    answered: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    unsent: int = 0
    good: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    repeated: int = 0
    cut: int = 0
    prompts: list[int] = field(default_factory=list)
    told_tokens: int = 0
    cached_tokens: int = 0
    passes: int = 0
    pass_tokens: int = 0
    user_seconds: float = 0.0
    started: float = 0.0
    last: float = 0.0
    spreads: dict[str, Spread] = field(
        default_factory=lambda: {name: Counter() for name in (*TIMES, *SERIES, "found_in")}
    )

    @property
    def sent(self) -> int:
        """Requests that have ended."""
        return sum(getattr(self, name) for name in ENDS)

    def end(self, name: str) -> None:
        """Count a request that has just ended, as one of `ENDS`."""
        setattr(self, name, getattr(self, name) + 1)
        self.last = time.time()

    def count(self, reply: Reply, limits: Mapping[str, float]) -> None:
        """Count an answer that has just become complete."""
        self.end("answered")
        self.good += reply.keeps(limits)
        self.input_tokens += reply.input_tokens
        self.output_tokens += reply.output_tokens
        if reply.cached_tokens is not None:
            self.told_tokens += reply.input_tokens
            self.cached_tokens += reply.cached_tokens
        if reply.passes is not None:
            self.passes += reply.passes
            self.pass_tokens += max(0, reply.output_tokens - 1)
        self.spreads["found_in"].update(reply.found_in)
        speed = reply.output_tokens / reply.latency
        times = {"latency": reply.latency, "ttft": reply.first, "tpot": reply.tpot, "speed": speed}
        times |= {"slowdown": reply.slowdown, reply.size: reply.first}
        for name, value in times.items():
            if value is not None:
                self.spreads[name][_rounded(value)] += 1
        for seconds, tokens in reply.gaps:
            self.spreads["itl"][_rounded(seconds / tokens)] += tokens
        first = reply.latency if reply.first is None else reply.first
        at = max(0.0, self.last - reply.latency + first - self.started)
        if reply.first is not None:
            self.spreads["ttft_at"][int(at), _rounded(first)] += 1
        rest = sum(tokens for _, tokens in reply.gaps)
        for seconds, tokens in ((0.0, reply.output_tokens - rest), *reply.gaps):
            at += seconds
            self.spreads["tokens_at"][int(at)] += tokens

    def data(self) -> dict[str, Any]:
        """The results as plain data; spreads as pairs, since messages have no numbers as keys."""
        spreads = {name: [*spread.items()] for name, spread in self.spreads.items()}
        others = {name: getattr(self, name) for name in ("prompts", "user_seconds", "last")}
        return {name: getattr(self, name) for name in COUNTS} | others | spreads

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the results of another process, or of another stage, from `data`."""
        for name in (*COUNTS, "user_seconds"):
            setattr(self, name, getattr(self, name) + other[name])
        for name, spread in self.spreads.items():
            for key, number in other[name]:
                spread[tuple(key) if isinstance(key, list) else key] += number
        self.last = max(self.last, other["last"])


COUNTS = tuple(one.name for one in fields(Tally) if one.type is int)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


class Recorder:
    """Tallies of all stages of one run, which began at `started`, by `time.time()`."""

    def __init__(self, stages: Sequence[Stage], started: float) -> None:
        self.stages = tuple(stages)
        self.started = started
        self.ended: float | None = None
        self.prompts: set[int] = set()
        self._users, self._since = 0, started  # closed-loop users, and until when they are counted
        self.clear()

    def clear(self) -> None:
        """Forget all results."""
        self.tallies = [Tally(started=self.started) for _ in self.stages]

    def note(self, tally: Tally, prompt: int) -> None:
        """Count a prompt, by its digest, that is sent or that another process has sent."""
        if prompt in self.prompts:
            tally.repeated += 1
        else:
            self.prompts.add(prompt)
            tally.prompts.append(prompt)

    def restart(self) -> None:
        """Forget all results and count from now on, of a run with one stage."""
        self.count_users()
        if len(self.stages) == 1:
            self.started = time.time()
        self.clear()

    def stage(self, at: float) -> int:
        """The index of the stage at a time, by `time.time()`; after the last one, the last."""
        index = stage_at(self.stages, max(0.0, at - self.started))
        return len(self.stages) - 1 if index is None else index

    def at(self, sent: float) -> Tally:
        """The tally of the stage in which a request was sent."""
        return self.tallies[self.stage(sent)]

    def count_users(self, change: int = 0) -> None:
        """Count the users until now in the stages in which they were; then some come or go.

        An end that was told late takes away what was counted after it.
        """
        begin, now = self.started, self._end()
        for stage, tally in zip(self.stages, self.tallies, strict=True):
            end = begin + stage.seconds
            until, since = (min(max(at, begin), end) for at in (now, self._since))
            tally.user_seconds += self._users * (until - since)
            begin = end
        self._users, self._since = self._users + change, now

    def take(self) -> list[dict[str, Any]]:
        """Return all results as plain data, and begin again without them."""
        self.count_users()
        taken = [tally.data() for tally in self.tallies]
        self.clear()
        return taken

    def add(self, taken: Sequence[Mapping[str, Any]]) -> None:
        """Add the results that another process returned from `take`."""
        for tally, other in zip(self.tallies, taken, strict=True):
            tally.add(other)
            for prompt in other["prompts"]:
                self.note(tally, prompt)

    @property
    def requests(self) -> int:
        """Requests that have ended, in all stages."""
        return sum(tally.sent for tally in self.tallies)

    def rows(self) -> list[Figures]:
        """Figures of every stage that has begun, with the users or arrivals that it asks for."""
        self.count_users()
        found = []
        begin = self.started
        for index, (stage, tally) in enumerate(zip(self.stages, self.tallies, strict=True)):
            if index and begin >= self._end():
                break
            asked = {"asked_users": stage.users, "asked_per_second": stage.rate}
            asking = min(stage.seconds, self._end() - begin)
            found.append({**asked, **summary(tally, asking, max(asking, tally.last - begin))})
            begin += stage.seconds
        return found

    def total(self) -> Tally:
        """The results of all stages."""
        self.count_users()
        total = Tally()
        for tally in self.tallies:
            total.add(tally.data())
        return total

    def whole(self) -> Figures:
        """Figures of the whole run, which ends with its last request."""
        total, asking = self.total(), self._end() - self.started
        return summary(total, asking, max(asking, total.last - self.started))

    def over_time(self, points: int = 60) -> list[Figures]:
        """At most so many pieces of the run, of equal length: tokens per second, TTFT."""
        total = self.total()
        seconds = max(1.0, max(self._end(), total.last) - self.started)
        width = math.ceil(seconds / points)
        last = max(1, round(seconds / width)) - 1
        tokens, ttft = Counter[int](), [Counter[float]() for _ in range(last + 1)]
        for at, number in total.spreads["tokens_at"].items():
            tokens[min(at // width, last)] += number
        for (at, value), number in total.spreads["ttft_at"].items():
            ttft[min(at // width, last)][value] += number
        found = []
        for piece, firsts in enumerate(ttft):
            end = seconds if piece == last else (piece + 1) * width
            rate = tokens[piece] / (end - piece * width)
            quantiles = {f"ttft_p{q * 100:g}": quantile(firsts, q) for q in (0.5, 0.95)}
            found.append({"seconds": end, "output_tokens_per_second": rate, **quantiles})
        return found

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


def summary(tally: Tally, asking: float, seconds: float) -> Figures:
    """Counts, shares, rates and quantiles of a tally.

    Args:
        asking: seconds in which requests were sent.
        seconds: the same and what the last of them took longer.
    """
    sent = tally.sent
    figures: Figures = {"seconds": seconds, "asking_seconds": asking}
    asking, seconds = max(asking, 1e-9), max(seconds, 1e-9)
    figures["users"] = tally.user_seconds / asking or None
    figures |= {name: getattr(tally, name) for name in COUNTS}
    figures["arrived_per_second"] = (sent + tally.unsent) / asking
    figures["answered_per_second"] = tally.answered / seconds
    figures["good_per_second"] = tally.good / seconds
    figures["input_tokens_per_second"] = tally.input_tokens / seconds
    figures["output_tokens_per_second"] = tally.output_tokens / seconds
    for name in ("good", "repeated", *ENDS[1:]):
        figures[f"{name}_share"] = ratio(figures[name], sent)
    figures["cached_share"] = ratio(tally.cached_tokens, tally.told_tokens)
    figures["tokens_per_pass"] = ratio(tally.pass_tokens, tally.passes)
    figures["found_in"] = dict(tally.spreads["found_in"])
    for name in TIMES:
        spread = tally.spreads[name]
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
    for row in rows:
        writer.writerow({k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()})
    return text.getvalue()


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report as JSON, and its stages as CSV beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    path.with_suffix(".csv").write_text(as_csv(report["stages"]), "utf-8", newline="")
