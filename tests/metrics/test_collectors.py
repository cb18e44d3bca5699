"""Collectors: the machine's figures are read when asked, and all of them are named beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from specops.metrics.collectors import MemoryCollector, ResourceCollector
from specops.system.memory import MemoryReading, Pressure
from specops.system.resources import Faults, Throttling, read_disk


def test_memory_and_pressure_are_read_when_asked() -> None:
    readings = [
        MemoryReading(anon=1, file=2, swap=3, limit=4, swap_limit=0, source="process"),
        MemoryReading(anon=10, file=2, swap=3, limit=4, swap_limit=0, source="process"),
    ]
    registry = CollectorRegistry()
    registry.register(MemoryCollector(lambda: readings.pop(0), lambda: Pressure(2.5, 1.5)))
    assert len(readings) == 2
    name = "specops_memory_bytes"
    assert registry.get_sample_value(name, {"kind": "limit"}) == 4
    assert registry.get_sample_value(name, {"kind": "anon"}) == 10


def test_pressure_is_zero_where_the_kernel_keeps_none() -> None:
    reading = MemoryReading(anon=1, file=2, swap=3, limit=4, swap_limit=0, source="process")
    for pressure, some in ((Pressure(2.5, 1.5), 2.5), (None, 0.0)):
        registry = CollectorRegistry()
        registry.register(MemoryCollector(lambda: reading, lambda answer=pressure: answer))
        name = "specops_memory_pressure_seconds_total"
        assert registry.get_sample_value(name, {"kind": "some"}) == some


@pytest.fixture
def registry(tmp_path: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    faults = [Faults(minor=10, major=1), Faults(minor=20, major=2)]
    collector = ResourceCollector(
        tmp_path, lambda: Throttling(100, 25, 1.5), lambda: 3, lambda: faults.pop(0)
    )
    registry.register(collector)
    return registry


def test_quota_and_kills_are_counted(registry: CollectorRegistry) -> None:
    page = {
        sample.name: sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.labels
    }
    assert page["specops_cpu_periods_total"] == 100
    assert page["specops_cpu_throttled_periods_total"] == 25
    assert page["specops_cpu_throttled_seconds_total"] == 1.5
    assert page["specops_oom_kills_total"] == 3
    assert page["specops_cpus"] > 0


def test_faults_are_read_at_each_collection(registry: CollectorRegistry) -> None:
    name, kind = "specops_page_faults_total", {"kind": "major"}
    assert [registry.get_sample_value(name, kind) for _ in range(2)] == [1, 2]


def test_the_volume_of_models_is_shown(registry: CollectorRegistry, tmp_path: Path) -> None:
    total = registry.get_sample_value("specops_disk_bytes", {"kind": "total"})
    assert total == read_disk(tmp_path).total > 0


def test_everything_collected_is_described(tmp_path: Path) -> None:
    for collector in (MemoryCollector(), ResourceCollector(tmp_path)):
        described = {(family.name, family.type) for family in collector.describe()}
        assert described == {(family.name, family.type) for family in collector.collect()}


def test_a_volume_is_known_before_its_folder_is_made(tmp_path: Path) -> None:
    assert read_disk(tmp_path / "not" / "yet").total == read_disk(tmp_path).total
