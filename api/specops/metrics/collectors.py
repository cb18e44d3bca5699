"""Reads figures at each scrape: memory, CPU, page faults, disk, pass costs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specops.system import resources
from specops.system.cpus import available_cpus
from specops.system.failures import Failures
from specops.system.memory import Pressure, read_memory, read_pressure
from specops.text import template_process

NAMESPACE = "specops"

_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
_Values = float | Mapping[str, float]
_Figure = tuple[str, Callable[[], _Values]]
# Kind, size and seconds of each pass cost.
PassCosts = Iterable[tuple[str, int, float]]
# Until a model is loaded, these series exist with 0.
_UNKNOWN_COSTS = tuple((kind, 1, 0.0) for kind in ("tokens", "draft_tokens", "attention"))
_DISK = "Size and free space of the volume that holds the models."


class MachineCollector(Collector):
    """Reads the figures of the machine, the process and the cost model, each independently.

    Args:
        volume: a folder on the volume that holds the models.
        failures: counts the figures that cannot be read; the page leaves them out.

    Attributes:
        pass_costs: returns the pass costs.
    """

    def __init__(self, volume: Path, failures: Failures) -> None:
        self._volume = volume
        self._failures = failures
        self._process = ProcessCollector(registry=None)
        self.pass_costs: Callable[[], PassCosts] = lambda: _UNKNOWN_COSTS

    def describe(self) -> Iterable[Metric]:
        """Name the series."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """Read the figures now."""
        gauges = _GAUGES | {"disk_bytes": (_DISK, partial(resources.read_disk, self._volume))}
        for family, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, _COUNTERS)):
            for name, (text, read) in figures.items():
                with self._failures.report_errors("scrape"):
                    yield _filled(family, name, text, read())
        for collect in (self._costs, self._process.collect):
            with self._failures.report_errors("scrape"):
                yield from collect()

    def _costs(self) -> Iterable[Metric]:
        costs = GaugeMetricFamily(
            f"{NAMESPACE}_pass_cost_seconds",
            "Cost of a forward pass by the cost model. `tokens`: a pass of `size` tokens with "
            "nothing before them, which all need logits; `draft_tokens`: the same for the draft "
            "model or an EAGLE-3 head; `attention`: 1,000,000 pairs of a token and a position that "
            "it attends to.",
            labels=["kind", "size"],
        )
        for kind, size, seconds in self.pass_costs():
            costs.add_metric([kind, str(size)], seconds)
        yield costs


def _memory() -> Mapping[str, float]:
    memory = read_memory()
    return {kind: getattr(memory, kind) for kind in ("anon", "file", "swap", "limit", "swap_limit")}


# Meaning and reader, which returns one value, or one per `kind`.
_GAUGES: dict[str, _Figure] = {
    "memory_bytes": (
        "Memory in use and its limits: the cgroup's if one limits the process, otherwise the "
        "process's and the machine's. `file` is page cache, which the kernel can drop.",
        _memory,
    ),
    "cpus": ("CPUs that the service may use, by affinity and quota.", available_cpus),
}
_COUNTERS: dict[str, _Figure] = {
    "memory_pressure_seconds": (
        "Seconds in which some or all tasks waited for memory (PSI).",
        lambda: asdict(read_pressure() or Pressure(0.0, 0.0)),
    ),
    "cpu_periods": (
        "Accounting periods of the CPU quota; 0 without one.",
        lambda: resources.read_throttling().periods,
    ),
    "cpu_throttled_periods": (
        "Periods in which the quota stopped the service.",
        lambda: resources.read_throttling().throttled_periods,
    ),
    "cpu_throttled_seconds": (
        "Seconds for which the quota stopped the service.",
        lambda: resources.read_throttling().throttled_seconds,
    ),
    "oom_kills": (
        "Processes that the kernel killed for lack of memory.",
        resources.read_oom_kills,
    ),
    "template_processes_ended": (
        "Processes for chat templates that ended. `limit`: a rendering took too much time or "
        "memory; `crash`: any other cause.",
        lambda: template_process.SHARED.ended,
    ),
    "page_faults": (
        "Page faults of the process; `major` faults read from disk.",
        resources.read_faults,
    ),
}


def _filled(family: _Family, name: str, text: str, values: _Values) -> Metric:
    """Make a metric of one value, or of one value per kind."""
    kinds = isinstance(values, Mapping)
    metric = family(f"{NAMESPACE}_{name}", text, labels=["kind"] if kinds else [])
    for kind, value in values.items() if isinstance(values, Mapping) else ((None, values),):
        metric.add_metric([kind] if kind else [], value)
    return metric
