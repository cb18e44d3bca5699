"""Records the results of a run, stage by stage: Locust's own statistics only count requests.

The figures have the usual definitions, the same for every protocol:

    latency   seconds from sending a request to the end of its answer (end-to-end)
    ttft      seconds from sending a request to its stream's first token
    tpot      seconds per output token after the first: (latency - ttft) / (output tokens - 1)
    itl       seconds between tokens: a chunk of n tokens counts n times an n-th of its gap
    speed     output tokens per second of one request, waiting included
    slowdown  ttft over the seconds that the prompt would take alone (`prefill.py`)
    ttft_*    ttft by length of the prompt

Every request counts in the stage in which it was sent. A stage's rates of answers and tokens are
over the time from its start to the end of its last request. With `--processes` each worker records
its own results and sends new ones to the master, which adds them up.
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
ENDS = ("answered", "refused", "failed", "cancelled")  # outcomes of a request
# Output tokens and times to the first token, by second of the run.
SERIES = ("tokens_at", "ttft_at")
QUANTILES = (0.5, 0.9, 0.95, 0.99)
_DIGITS = 3  # significant digits of a time: within 1 %, and a soak's tokens fit into memory

Spread = Counter[Any]  # how often each value was observed
# Figures by name. A share, mean or quantile of no values is None.
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer.

    Attributes:
        text: the text, reasoning included.
        input_tokens, output_tokens: numbers of tokens.
        latency: seconds to the end of the answer.
        first: seconds to the first token; None if the answer was not streamed, or was empty.
        gaps: for each chunk after the first, seconds since the previous one, and its tokens.
        cached_tokens: input tokens from the API's prefix cache; None: it does not say.
        passes: the target's passes after the first token; None: the API does not say.
        found_in: accepted draft tokens by where they were found; empty if the API does not say.
        alone: seconds that the prompt would take alone; None: unknown.
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
        """Time to the first token over the prompt's time alone; None if unknown."""
        return self.first / self.alone if self.first is not None and self.alone else None

    @property
    def size(self) -> str:
        """The element of `SIZES` for the length of the prompt."""
        return SIZES[bisect_left(PROMPT_SIZES, self.input_tokens)]

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None if there are none."""
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.latency - self.first) / (self.output_tokens - 1)

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """Whether each measured time is within its limit."""
        times = {"latency": self.latency, "ttft": self.first, "tpot": self.tpot}
        return all((times[name] or 0.0) <= limit for name, limit in limits.items())


def token_gaps(
    chunks: Sequence[tuple[float, int | None, int]], total: int
) -> list[tuple[float, int]]:
    """Seconds since the previous chunk, and tokens, for all chunks of a stream but the first.

    Args:
        chunks: for each chunk its time, its tokens (None if the protocol does not count them), and
            its characters.
        total: tokens of the answer, which are spread over the chunks by characters where the
            protocol does not count them.
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
    """The results of one stage. Times are in seconds; `itl` counts once per token.

    Attributes:
        answered, refused, failed, cancelled: numbers of requests by outcome.
        unsent: number of requests that were due but not sent.
        good: number of answers within the goodput limits.
        input_tokens, output_tokens: numbers of tokens of all answers.
        repeated: number of prompts already sent in this run.
        cut: number of requests shortened to the model's limits.
        prompts: digests of prompts not sent before, until the next `take`.
        told_tokens, cached_tokens: input tokens and cached tokens of answers that report both.
        passes, pass_tokens: passes and tokens after the first of answers that report passes.
        user_seconds: total time of closed-loop users.
        started: start of the run, by `time.time()`.
        last: end of the last request, by `time.time()`.
        spreads: distributions by name.
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
        """Count an answer that has just been completed."""
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
        """The results as plain data; spreads are pairs, as messages allow no numbers as keys."""
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
    """Tallies of all stages of one run.

    Args:
        stages: the run's stages.
        started: its start, by `time.time()`.

    Attributes:
        stages, started: the same.
        ended: its end, by `time.time()`; None: it is still running.
        prompts: digests of all prompts sent so far.
        tallies: one per stage.
    """

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
        """Count a prompt, by its digest, that this or another process sends."""
        if prompt in self.prompts:
            tally.repeated += 1
        else:
            self.prompts.add(prompt)
            tally.prompts.append(prompt)

    def restart(self) -> None:
        """Forget all results; a run with one stage starts over."""
        self.count_users()
        if len(self.stages) == 1:
            self.started = time.time()
        self.clear()

    def stage(self, at: float) -> int:
        """The index of the stage at a time (`time.time()`); after the end, that of the last."""
        index = stage_at(self.stages, max(0.0, at - self.started))
        return len(self.stages) - 1 if index is None else index

    def at(self, sent: float) -> Tally:
        """The tally of the stage in which a request was sent."""
        return self.tallies[self.stage(sent)]

    def count_users(self, change: int = 0) -> None:
        """Add the users' time until now to the stages, then change the number of users.

        If the run ended before the last call, the time after its end is subtracted.
        """
        begin, now = self.started, self._end()
        for stage, tally in zip(self.stages, self.tallies, strict=True):
            end = begin + stage.seconds
            until, since = (min(max(at, begin), end) for at in (now, self._since))
            tally.user_seconds += self._users * (until - since)
            begin = end
        self._users, self._since = self._users + change, now

    def take(self) -> list[dict[str, Any]]:
        """Return all results as plain data, and clear them."""
        self.count_users()
        taken = [tally.data() for tally in self.tallies]
        self.clear()
        return taken

    def add(self, taken: Sequence[Mapping[str, Any]]) -> None:
        """Add the results that another process got from `take`."""
        for tally, other in zip(self.tallies, taken, strict=True):
            tally.add(other)
            for prompt in other["prompts"]:
                self.note(tally, prompt)

    @property
    def requests(self) -> int:
        """Number of finished requests in all stages."""
        return sum(tally.sent for tally in self.tallies)

    def rows(self) -> list[Figures]:
        """Figures of every stage that has begun, with its planned users or arrivals."""
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
        """Figures of the whole run, until the end of its last request."""
        total, asking = self.total(), self._end() - self.started
        return summary(total, asking, max(asking, total.last - self.started))

    def over_time(self, points: int = 60) -> list[Figures]:
        """Tokens per second and TTFT of at most `points` equal periods of the run."""
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
    """The smallest value that at least a share `q` of the values do not exceed; None of none."""
    left = max(1, math.ceil(q * values.total()))
    for value in sorted(values):
        left -= values[value]
        if left <= 0:
            return value
    return None


def ratio(part: float, whole: float) -> float | None:
    """A share or a mean; None if the whole is 0."""
    return part / whole if whole else None


def summary(tally: Tally, asking: float, seconds: float) -> Figures:
    """Counts, shares, rates and quantiles of a tally.

    Args:
        tally: the results.
        asking: seconds in which requests were sent.
        seconds: seconds until the last of them ended.
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
    """The stages as CSV; figures that were not measured are empty."""
    text = StringIO(newline="")
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    for row in rows:
        writer.writerow({k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()})
    return text.getvalue()


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report as JSON, and its stages as CSV next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    path.with_suffix(".csv").write_text(as_csv(report["stages"]), "utf-8", newline="")
