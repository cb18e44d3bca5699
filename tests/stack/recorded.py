"""A service that exists in figures alone, as Prometheus would have scraped it every five seconds.

Requests wait, run and end in simulated time, and the service's own `Metrics` counts them: so rules
and panels are asked about series that fit together, and what really happened stays at hand.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from specops.metrics.metrics import Metrics
from specops.request import Draft, FinishReason, GenerationRequest, GenerationStats, Step, StepKind
from tests.stack import queries
from tests.stack.support import promtool

SCRAPE = 5  # seconds
SLOTS, QUEUE, MEMORY = 4, 32, 4 << 30  # of one service; the last: its limit in bytes
ASKED = GenerationRequest(request_id="r", prompt_tokens=(1,) * 8, max_new_tokens=9)
STATS = GenerationStats(8, 5, generated_tokens=9, sequence_steps=4)

Sample = dict[str, Any]  # of promtool: labels and value
Case = tuple[float, str, Sequence[Sample]]  # seconds, expression, its samples at that time


@dataclass
class Service:
    """One process of the service.

    Attributes:
        now: seconds since the recording began.
        anon: bytes of memory that cannot be dropped.
        gain: what the controller estimates of the latest steps.
        waiting: the arrivals of requests without a slot.
        busy: of requests with a slot, the arrival, the end and the seconds that they waited.
        ended: for each answer, when it ended and how many seconds after its arrival.
        refused: when requests were refused.
    """

    now: float = 0.0
    anon: int = 1 << 30
    gain: float = 1.5
    waiting: list[float] = field(default_factory=list)
    busy: list[tuple[float, float, float]] = field(default_factory=list)
    ended: list[tuple[float, float]] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = self.now
        self._seconds = cycle((2, 5, 3, 9, 14))  # that requests take in a slot
        self.metrics = Metrics(clock=lambda: self.now)
        self.metrics.set_queue_size(QUEUE)
        self.metrics.set_model({"name": "a-model"}, SLOTS, 4096, {})
        self.metrics.watch_waiting(lambda: len(self.waiting))
        self.metrics.watch_controller(lambda: self.gain, lambda: [("tokens", 1, 0.1)])
        self.metrics.set_state("ready")

    def work(self, users: int = 0) -> None:
        """One second passes; each user asks again at once when a request has ended."""
        for _ in range(users - len(self.waiting) - len(self.busy)):
            if len(self.waiting) < QUEUE:
                self.waiting.append(self.now)
            else:
                self.refused.append(self.now)
                self.metrics.observe_rejected("queue_full")
        self.now += 1
        while self.waiting and len(self.busy) < SLOTS:
            arrival = self.waiting.pop(0)
            self.busy.append((arrival, self.now + next(self._seconds), self.now - arrival))
        count = len(self.busy)
        self.metrics.observe_step(
            Step(
                StepKind.VERIFY if count else None,
                seconds=0.9,
                decoding=count,
                emitted_tokens=2 * count,
                drafts=[Draft((1, 2, 3), drafter="suffix", accepted=1, found_in="text")] * count,
                running=count,
            )
        )
        for arrival, end, wait in self.busy:
            if end <= self.now:
                latency = self.now - arrival
                stats = replace(STATS, prefill_seconds=wait + 1)
                self.ended.append((self.now, latency))
                self.metrics.observe_finish(ASKED, FinishReason.LENGTH, stats, latency)
        self.busy = [one for one in self.busy if one[1] > self.now]

    def bounds(self, histogram: str) -> list[float]:
        """The borders of a histogram's buckets, from 0 on."""
        (family,) = self.metrics.registry.restricted_registry([f"{histogram}_bucket"]).collect()
        return sorted({0.0, *(float(one.labels["le"]) for one in family.samples)})

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Name, labels and value of all that its page shows; the machine's figures are made up."""
        own = {
            "process_start_time_seconds": self.started,
            "specops_model_ready_timestamp_seconds": self.started,
            "process_cpu_seconds_total": self.now - self.started,
            "specops_cpus": 2,
        }
        memory = {"anon": self.anon, "limit": MEMORY}
        for family in self.metrics.registry.collect():
            for name, labels, value, *_ in family.samples:
                if name == "specops_memory_bytes":
                    yield name, labels, memory.get(labels["kind"], 0)
                else:
                    yield name, labels, own.get(name, value)


class Recording:
    """What Prometheus has of its targets, which tests then ask for."""

    def __init__(self) -> None:
        self.scrapes = 0
        self._series: dict[str, list[str]] = {}
        self._latest: set[str] = set()
        known = {name for _, promql in _QUERIES for name in queries.asked(promql).names}
        self._known = known | {f"{name}_count" for name in known}

    @property
    def now(self) -> float:
        """Seconds at which the latest scrape was."""
        return (self.scrapes - 1) * SCRAPE

    def scrape(self, **targets: Service | None) -> None:
        """Read all targets; one that is None does not answer. Others are gone: their series end."""
        found = {}
        for instance, service in targets.items():
            attached = {"job": "specops", "instance": instance}
            found[written("up", attached)] = str(int(service is not None))
            for name, labels, value in service.samples() if service else ():
                if name in self._known:
                    found[written(name, {**attached, **labels})] = f"{value:.12g}".replace(
                        "nan", "NaN"
                    )
        for series in self._latest - set(found):
            self._of(series).append("stale")
        for series, value in found.items():
            self._of(series).append(value)
        self._latest = set(found)
        self.scrapes += 1

    def stop(self, seconds: int) -> None:
        """Prometheus is not there for so long; it marks no end of the series that it had."""
        self._latest = set()
        self.scrapes += seconds // SCRAPE

    def play(self, seconds: int, users: int = 0, **targets: Service | None) -> None:
        """Let the services work for so long, each for so many users, and read them meanwhile."""
        for second in range(1, seconds + 1):
            for service in filter(None, targets.values()):
                service.work(users)
            if not second % SCRAPE:
                self.scrape(**targets)

    def check(self, cases: Sequence[Case], folder: Path) -> None:
        """Each expression has its samples; see `check`."""
        series = {name: " ".join(_shortened(values)) for name, values in self._series.items()}
        check(series, cases, folder)

    def _of(self, series: str) -> list[str]:
        values = self._series.setdefault(series, [])
        values.extend("_" * (self.scrapes - len(values)))
        return values


_QUERIES = [*queries.dashboard_queries(), *queries.annotation_queries(), *queries.rule_queries()]


def check(series: Mapping[str, str], cases: Sequence[Case], folder: Path) -> None:
    """Each expression has its samples, with all rules and alerts evaluated at every scrape."""
    tests = [
        {"expr": promql, "eval_time": f"{at:g}s", "exp_samples": found}
        for at, promql, found in cases
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": f"{SCRAPE}s", "input_series": inputs, "promql_expr_test": tests}
    file = folder / "recorded.json"  # which is YAML, too
    rules = [str(path) for path in queries.RULE_FILES]
    # Without an order it would be chance whether alerts see what was just recorded.
    content = {
        **{"rule_files": rules, "group_eval_order": ["specops", "alerts"]},
        **{"evaluation_interval": f"{SCRAPE}s", "tests": [test]},
    }
    file.write_text(json.dumps(content), encoding="utf-8")
    promtool("test", "rules", file)


def one(value: float) -> list[Sample]:
    """A sample without a label."""
    return [{"labels": "{}", "value": value}]


def query(panel: str, legend: str | None = None, board: str = "healthy") -> str:
    """The expression of a panel."""
    (promql,) = (
        target["expr"]
        for name, found in queries.panels()
        for target in queries.targets(found)
        if (name, found["title"]) == (board, panel) and legend in {None, target["legendFormat"]}
    )
    return queries.filled(promql)


def written(name: str, labels: dict[str, str]) -> str:
    """A series as Prometheus writes it."""
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


def _shortened(values: list[str]) -> Iterator[str]:
    for value, same in groupby(values):
        times = len(list(same))
        repeated = times > 1 and value not in {"NaN", "stale"}
        # promtool's `1x2` is a value and two more, `_x3` three that are missing.
        yield from [f"{value}x{times - (value != '_')}"] if repeated else [value] * times
