"""Figures that are read when Prometheus asks, not before: memory, processor, faults, disk, costs.

Each collector takes its readers, so that a test can put others in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specops.system import resources
from specops.system.cpus import available_cpus
from specops.system.memory import MemoryReading, Pressure, read_memory, read_pressure

NAMESPACE = "specops"

# Kind, size, seconds. There from the start, as 0; further sizes once a model is loaded.
PassCosts = Iterable[tuple[str, int, float]]
_UNKNOWN_COSTS = tuple((kind, 1, 0.0) for kind in ("tokens", "draft_tokens", "attention"))


class MemoryCollector(Collector):
    """Memory held and allowed, and the time lost for lack of it."""

    def __init__(
        self,
        memory: Callable[[], MemoryReading] = read_memory,
        pressure: Callable[[], Pressure | None] = read_pressure,
    ) -> None:
        self._memory = memory
        self._pressure = pressure

    def describe(self) -> Iterable[Metric]:
        """Name the series without reading anything."""
        return self._families()

    def collect(self) -> Iterable[Metric]:
        """Read the figures now."""
        memory_bytes, pressure_seconds = self._families()
        reading = self._memory()
        for kind in ("anon", "file", "swap", "limit", "swap_limit"):
            memory_bytes.add_metric([kind], getattr(reading, kind))
        pressure = self._pressure() or Pressure(0.0, 0.0)
        pressure_seconds.add_metric(["some"], pressure.some)
        pressure_seconds.add_metric(["full"], pressure.full)
        return memory_bytes, pressure_seconds

    def _families(self) -> tuple[GaugeMetricFamily, CounterMetricFamily]:
        return (
            GaugeMetricFamily(
                f"{NAMESPACE}_memory_bytes",
                "Memory held and allowed. Of the cgroup where one limits the process, otherwise "
                "of the process, with the machine's memory as limit. `file` is reclaimable page "
                "cache; `swap_limit` is 0 on a machine without swap.",
                labels=["kind"],
            ),
            CounterMetricFamily(
                f"{NAMESPACE}_memory_pressure_seconds",
                "Seconds in which some or all tasks waited for memory (PSI); 0 where the kernel "
                "keeps no pressure figures.",
                labels=["kind"],
            ),
        )


class ResourceCollector(Collector):
    """What the machine grants besides memory.

    Args:
        volume: a folder on the volume that models are kept on.
    """

    def __init__(
        self,
        volume: Path,
        throttling: Callable[[], resources.Throttling] = resources.read_throttling,
        oom_kills: Callable[[], int] = resources.read_oom_kills,
        faults: Callable[[], resources.Faults] = resources.read_faults,
    ) -> None:
        self._volume = volume
        self._throttling = throttling
        self._oom_kills = oom_kills
        self._faults = faults

    def describe(self) -> Iterable[Metric]:
        """Name the series without reading anything."""
        return (*self._counters().values(), *self._gauges().values())

    def collect(self) -> Iterable[Metric]:
        """Read the figures now."""
        counters, gauges = self._counters(), self._gauges()
        throttling, faults = self._throttling(), self._faults()
        counters["cpu_periods"].add_metric([], throttling.periods)
        counters["cpu_throttled_periods"].add_metric([], throttling.throttled_periods)
        counters["cpu_throttled_seconds"].add_metric([], throttling.throttled_seconds)
        counters["oom_kills"].add_metric([], self._oom_kills())
        counters["page_faults"].add_metric(["minor"], faults.minor)
        counters["page_faults"].add_metric(["major"], faults.major)
        gauges["cpus"].add_metric([], available_cpus())
        disk = resources.read_disk(self._volume)
        gauges["disk_bytes"].add_metric(["total"], disk.total)
        gauges["disk_bytes"].add_metric(["free"], disk.free)
        return (*counters.values(), *gauges.values())

    def _counters(self) -> dict[str, CounterMetricFamily]:
        texts: dict[str, tuple[str, list[str]]] = {
            "cpu_periods": ("Accounting periods of the processor quota; 0 without one.", []),
            "cpu_throttled_periods": ("Periods in which the quota stopped the service.", []),
            "cpu_throttled_seconds": ("Seconds for which the quota stopped the service.", []),
            "oom_kills": ("Processes that the kernel killed for lack of memory.", []),
            "page_faults": (
                "Page faults of the process: `major` ones had to read from disk.",
                ["kind"],
            ),
        }
        return {
            name: CounterMetricFamily(f"{NAMESPACE}_{name}", text, labels=labels)
            for name, (text, labels) in texts.items()
        }

    def _gauges(self) -> dict[str, GaugeMetricFamily]:
        texts: dict[str, tuple[str, list[str]]] = {
            "cpus": ("Processors that affinity and quota leave the service.", []),
            "disk_bytes": ("The volume that models are kept on.", ["kind"]),
        }
        return {
            name: GaugeMetricFamily(f"{NAMESPACE}_{name}", text, labels=labels)
            for name, (text, labels) in texts.items()
        }


class PassCostCollector(Collector):
    """Reads what the cost model takes passes to cost when Prometheus asks.

    Attributes:
        costs: kind of cost, its size, seconds.
    """

    def __init__(self) -> None:
        self.costs: Callable[[], PassCosts] = lambda: _UNKNOWN_COSTS

    def describe(self) -> Iterable[Metric]:
        """Name the series without reading anything."""
        return (self._family(),)

    def collect(self) -> Iterable[Metric]:
        """Read the figures now."""
        family = self._family()
        for kind, size, seconds in self.costs():
            family.add_metric([kind, str(size)], seconds)
        return (family,)

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            f"{NAMESPACE}_pass_cost_seconds",
            "What the scheduler takes a forward pass to cost now: measured at start, then kept up "
            "to date. `tokens`: a pass of `size` tokens with nothing before them; `draft_tokens`: "
            "the same of the draft model; `attention`: what 1,000,000 pairs of a token and a "
            "position that it attends to add.",
            labels=["kind", "size"],
        )
