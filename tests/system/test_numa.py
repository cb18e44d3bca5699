"""Weights are spread over NUMA nodes if there are several."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specops.models.graph import weight_cache
from specops.system import numa

DEFAULT, PREFERRED, INTERLEAVE = 0, 1, 3


def machine(folder: Path, memory: str, cpus: dict[int, str]) -> Path:
    """Write /sys/devices/system/node: nodes with memory, and the CPUs of each node."""
    folder.mkdir()
    (folder / "has_memory").write_text(f"{memory}\n")
    for node, numbers in cpus.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(f"{numbers}\n")
    return folder


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ({*range(16)}, (0, 1)),
        ({*range(4)}, (0,)),  # bound to one socket: its memory is the nearest
        ({3, 4}, (0, 1)),
        ({8, 15}, (0, 1)),
        (set(), ()),
    ],
)
def test_nodes_are_those_whose_processors_compute(
    tmp_path: Path, allowed: set[int], expected: tuple[int, ...]
) -> None:
    """Node 2 has memory and no processor, as memory behind CXL has; node 3 has no memory."""
    cpus = {0: "0-3,8-11", 1: "4-7,12-15", 2: "", 3: "16-19"}
    system = machine(tmp_path / "node", "0-2", cpus)
    assert numa.nodes(allowed, system) == expected


def test_a_system_that_does_not_say_has_none(tmp_path: Path) -> None:
    assert numa.nodes({0}, tmp_path) == ()
    system = machine(tmp_path / "node", "0-1", {0: "0"})  # node 1 is not described
    assert numa.nodes({0}, system) == ()


class Kernel:
    """The policy of a thread, as the system keeps it."""

    def __init__(self) -> None:
        self.policy: int | None = DEFAULT
        self.set: list[tuple[int, tuple[int, ...]]] = []

    def set_policy(self, mode: int, over: tuple[int, ...]) -> bool:
        self.set.append((mode, tuple(over)))
        self.policy = mode
        return True


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    found = Kernel()
    monkeypatch.setattr(numa, "_policy", lambda: found.policy)
    monkeypatch.setattr(numa, "_set_policy", found.set_policy)
    monkeypatch.setattr(numa, "nodes", lambda: (0, 1))
    return found


def test_a_policy_lasts_as_long_as_the_reading(kernel: Kernel) -> None:
    def read() -> None:
        with numa.interleaved():
            assert kernel.policy == INTERLEAVE
            raise OSError("the disk fails")

    with pytest.raises(OSError, match="disk"):
        read()
    assert kernel.set == [(INTERLEAVE, (0, 1)), (DEFAULT, ())]
    assert numa.described() == "0, 1; weights are interleaved over them"


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (PREFERRED, "as the process's own memory policy says"),
        (INTERLEAVE, "as the process's own memory policy says"),
        (None, "where they were read first: the system refuses memory policies"),  # as Docker does
    ],
)
def test_what_numactl_chose_stays_and_so_does_a_system_without_policies(
    kernel: Kernel, policy: int | None, told: str
) -> None:
    kernel.policy = policy
    with numa.interleaved():
        assert kernel.policy == policy
    assert not kernel.set
    assert numa.described() == f"0, 1; weights lie {told}"


@pytest.mark.parametrize("places", [(), (0,)])
def test_one_node_needs_no_policy(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, places: tuple[int, ...]
) -> None:
    monkeypatch.setattr(numa, "nodes", lambda: places)
    with numa.interleaved():
        assert kernel.policy == DEFAULT
    assert not kernel.set
    assert numa.described() == "1"


@pytest.mark.parametrize(("system", "kind"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_elsewhere_there_are_no_policies(
    monkeypatch: pytest.MonkeyPatch, system: str, kind: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: kind)
    assert numa._policy() is None
    with numa.interleaved((0, 1)):
        assert numa._policy() is None


def test_the_systems_own_calls() -> None:
    """The same node twice stands for a machine with several nodes."""
    if numa._policy() != DEFAULT:
        pytest.skip("no memory policies here, or the tests run under one")
    with numa.interleaved((0, 0)):
        assert numa._policy() == INTERLEAVE
    assert numa._policy() == DEFAULT


def test_weights_are_read_under_the_policy(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both when the cache is written and when it is checked."""
    seen: list[int | None] = []

    def checksums(*arguments: object) -> dict[str, str]:
        seen.append(kernel.policy)
        return {"model.onnx": "0"}

    monkeypatch.setattr(weight_cache, "checksums", checksums)
    monkeypatch.setattr(weight_cache, "_prepack", _written)
    made = weight_cache._make(tmp_path / "model.onnx", tmp_path / "made")
    assert weight_cache._intact(made.parent, lambda detail: None)
    assert seen == [INTERLEAVE, INTERLEAVE]
    assert kernel.policy == DEFAULT


def _written(graph: Path, destination: Path) -> None:
    destination.write_bytes(b"graph")
    destination.with_name(weight_cache.USED).write_text("0")
