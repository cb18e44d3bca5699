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
TWICE = (0, 0)  # for the system calls, the same node twice is a machine with several nodes


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


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with several nodes, without a policy of the process."""
    if numa._policy() != DEFAULT:
        pytest.skip("no memory policies here, or the tests run under one")
    monkeypatch.setattr(numa, "nodes", lambda: TWICE)
    yield
    numa._set_policy(DEFAULT, ())


@pytest.mark.usefixtures("policies")
def test_a_policy_lasts_as_long_as_the_reading() -> None:
    def read() -> None:
        with numa.interleaved():
            assert numa._policy() == INTERLEAVE
            raise OSError("the disk fails")

    with pytest.raises(OSError, match="disk"):
        read()
    assert numa._policy() == DEFAULT
    assert numa.described() == "0, 0; weights are interleaved over them"
    with numa.interleaved((0,)):  # one node needs no policy
        assert numa._policy() == DEFAULT


@pytest.mark.usefixtures("policies")
@pytest.mark.parametrize("policy", [PREFERRED, INTERLEAVE])
def test_a_policy_of_numactl_stays(policy: int) -> None:
    assert numa._set_policy(policy, (0,))
    with numa.interleaved():
        assert numa._policy() == policy
    assert numa._policy() == policy
    assert numa.described() == "0, 0; weights lie as the process's own memory policy says"


@pytest.mark.parametrize(("system", "kind"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_elsewhere_there_are_no_policies(
    monkeypatch: pytest.MonkeyPatch, system: str, kind: str
) -> None:
    """Docker, too, refuses memory policies."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: kind)
    with numa.interleaved(TWICE):
        assert numa._policy() is None
    monkeypatch.setattr(numa, "nodes", lambda: (0,))
    assert numa.described() == "1"
    monkeypatch.setattr(numa, "nodes", lambda: (0, 1))
    told = "0, 1; weights lie where they were read first: the system refuses memory policies"
    assert numa.described() == told


@pytest.mark.usefixtures("policies")
def test_weights_are_read_under_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both when the cache is written and when it is checked."""
    seen: list[int | None] = []

    def checksums(*arguments: object) -> dict[str, str]:
        seen.append(numa._policy())
        return {"model.onnx": "0"}

    def prepack(graph: Path, destination: Path, lock: int) -> None:
        destination.write_bytes(b"graph")
        destination.with_name(weight_cache.USED).write_text("0")

    monkeypatch.setattr(weight_cache, "checksums", checksums)
    monkeypatch.setattr(weight_cache, "_prepack", prepack)
    made = weight_cache._make(tmp_path / "model.onnx", tmp_path / "made", 0)
    assert weight_cache._intact(made.parent, lambda detail: None)
    assert seen == [INTERLEAVE, INTERLEAVE]
    assert numa._policy() == DEFAULT
