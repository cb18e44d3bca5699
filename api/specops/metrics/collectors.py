"""Figures that are read when Prometheus asks: memory, processor, page faults, disk, pass costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specops.system import resources
from specops.system.cpus import available_cpus
from specops.system.failures import Failures
from specops.system.memory import Pressure, read_memory, read_pressure
from specops.text import template_process

NAMESPACE = "specops"

# Kind, size and seconds of each pass cost.
PassCosts = Iterable[tuple[str, int, float]]
# Until a model is loaded, these series exist with 0.
_UNKNOWN_COSTS = tuple((kind, 1, 0.0) for kind in ("tokens", "draft_tokens", "attention"))


class AloneCollector(Collector):
    """Another collector, whose figures are missing from the page if it fails."""

    def __init__(self, collector: Collector, failures: Failures) -> None:
        self._collector = collector
        self._failures = failures

    def describe(self) -> Iterable[Metric]:
        """Name the series."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Read the figures now."""
        with self._failures.contained("scrape"):
            return list(self._collector.collect())
        return []


class MachineCollector(Collector):
    """Reads the figures of the machine and of the cost model, each by itself.

    Args:
        volume: a folder on the volume that holds the models.
        failures: counts the figures that cannot be read; they are missing from the page.

    Attributes:
        pass_costs: returns the pass costs.
    """

    def __init__(self, volume: Path, failures: Failures) -> None:
        self._volume = volume
        self._failures = failures
        self.pass_costs: Callable[[], PassCosts] = lambda: _UNKNOWN_COSTS

    def describe(self) -> Iterable[Metric]:
        """Name the series."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Read the figures now."""
        families = (
            _memory,
            _pressure,
            _throttling,
            _oom_kills,
            _template_processes,
            _faults,
            _cpus,
        )
        for read in (*families, self._disk, self._costs):
            with self._failures.contained("scrape"):
                yield from read()

    def _disk(self) -> Iterable[Metric]:
        disk = resources.read_disk(self._volume)
        yield _gauge(
            "disk_bytes",
            "Size and free space of the volume that holds the models.",
            {"total": disk.total, "free": disk.free},
        )

    def _costs(self) -> Iterable[Metric]:
        costs = GaugeMetricFamily(
            f"{NAMESPACE}_pass_cost_seconds",
            "Cost of a forward pass by the cost model: measured at the start, then updated. "
            "`tokens`: a pass of `size` tokens with nothing before them; `draft_tokens`: the same "
            "for the draft model, once updated with choosing its tokens; `attention`: added cost "
            "of 1,000,000 pairs of a token and a position that it attends to.",
            labels=["kind", "size"],
        )
        for kind, size, seconds in self.pass_costs():
            costs.add_metric([kind, str(size)], seconds)
        yield costs


def _memory() -> Iterable[Metric]:
    memory = read_memory()
    kinds = ("anon", "file", "swap", "limit", "swap_limit")
    yield _gauge(
        "memory_bytes",
        "Memory held and allowed: of the cgroup if one limits the process, else of the process "
        "with the machine's memory as limit. `file` is page cache that the kernel can drop; "
        "`swap_limit` is 0 on a machine without swap.",
        {kind: getattr(memory, kind) for kind in kinds},
    )


def _pressure() -> Iterable[Metric]:
    pressure = read_pressure() or Pressure(0.0, 0.0)
    yield _counter(
        "memory_pressure_seconds",
        "Seconds in which some or all tasks waited for memory (PSI); 0 if the kernel keeps no "
        "pressure figures.",
        {"some": pressure.some, "full": pressure.full},
    )


def _throttling() -> Iterable[Metric]:
    throttling = resources.read_throttling()
    yield _counter(
        "cpu_periods",
        "Accounting periods of the processor quota; 0 without one.",
        throttling.periods,
    )
    yield _counter(
        "cpu_throttled_periods",
        "Periods in which the quota stopped the service.",
        throttling.throttled_periods,
    )
    yield _counter(
        "cpu_throttled_seconds",
        "Seconds for which the quota stopped the service.",
        throttling.throttled_seconds,
    )


def _oom_kills() -> Iterable[Metric]:
    yield _counter(
        "oom_kills",
        "Processes that the kernel killed for lack of memory.",
        resources.read_oom_kills(),
    )


def _template_processes() -> Iterable[Metric]:
    yield _counter(
        "template_processes_ended",
        "Processes for chat templates that were ended: `limit`, by a rendering that took too "
        "much time or memory; `crash`, by anything else. Each costs one request an error.",
        template_process.SHARED.ended,
    )


def _faults() -> Iterable[Metric]:
    faults = resources.read_faults()
    yield _counter(
        "page_faults",
        "Page faults of the process; `major` faults read from disk.",
        {"minor": faults.minor, "major": faults.major},
    )


def _cpus() -> Iterable[Metric]:
    yield _gauge(
        "cpus",
        "Processors that the service may use, by affinity and quota.",
        available_cpus(),
    )


def _gauge(name: str, text: str, values: float | Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(f"{NAMESPACE}_{name}", text, labels=_labels(values)), values)


def _counter(name: str, text: str, values: float | Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(f"{NAMESPACE}_{name}", text, labels=_labels(values)), values)


def _labels(values: float | Mapping[str, float]) -> list[str]:
    return ["kind"] if isinstance(values, Mapping) else []


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, values: float | Mapping[str, float]
) -> Metric:
    """Add one value, or a value for each kind."""
    if isinstance(values, Mapping):
        for kind, value in values.items():
            family.add_metric([kind], value)
    else:
        family.add_metric([], values)
    return family
