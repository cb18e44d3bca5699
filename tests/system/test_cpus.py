"""Threads follow the cgroup's quota and the affinity."""

import math
import os
import subprocess
import sys

import pytest

from specops.system.cpus import cpu_quota
from tests.system.machine import Machine, limited


def quota_v1(folder: str, quota: int) -> dict[str, object]:
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": 100_000}


V1 = "3:cpu,cpuacct:"
QUOTAS: dict[str, tuple[list[str], dict[str, object], float]] = {
    "no cgroup": (["0::/"], {}, math.inf),
    "none, version 2": (["0::/"], {"cpu.max": "max 100000"}, math.inf),
    "one and a half, version 2": (["0::/"], {"cpu.max": "150000 100000"}, 1.5),
    "none, version 1": (["0::/", f"{V1}/"], quota_v1("cpu", -1), math.inf),
    "a half, version 1": (["0::/", f"{V1}/"], quota_v1("cpu", 50_000), 0.5),
    "the lowest of those above": (
        ["0::/pod/api"],
        {"pod/cpu.max": "150000 100000", "pod/api/cpu.max": "max 100000"},
        1.5,
    ),
    "the lowest of both versions": (
        [f"{V1}/pod/api", "0::/pod/api"],
        {"pod/api/cpu.max": "150000 100000", **quota_v1("cpu/pod/api", 50_000)},
        0.5,
    ),
    "the mount's, outside of the container": (
        ["0::/../../docker/abc"], {"cpu.max": "200000 100000"}, 2.0
    ),
    "the mount's, in a container": (["0::/docker/abc"], {"cpu.max": "200000 100000"}, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTAS)
def test_the_quota_of_the_cgroups_is_read(machine: Machine, case: str) -> None:
    cgroups, files, quota = QUOTAS[case]
    machine.enter(*cgroups)
    machine.set(files)
    assert cpu_quota(machine.root, machine.proc) == quota


PRINT_THREADS = [
    sys.executable,
    "-c",
    "from specops.system import cpus; print(cpus.available_threads())",
]


def test_threads_follow_a_real_affinity() -> None:
    one = min(os.sched_getaffinity(0))
    pinned = subprocess.run(
        PRINT_THREADS,
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {one}),
    )
    assert pinned.stdout.strip() == "1"


def test_threads_follow_a_real_quota() -> None:
    with limited(cpus=1.5) as group:
        command = group.enclosed(PRINT_THREADS)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
