"""The cap table: what is measured under a real cap, kept case by case and drawn."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.memory import capped, caps
from bench.memory.capped import Case, Load, Record, measure
from bench.memory.caps import LOADS, cases, keep, read
from bench.memory.cgroup import CgroupError, cgroup, evict
from specops.config import Settings
from tests.system.page_cache import cached

SERVED = Record(
    slots=8, context=2048, kv_tokens=4096, start_seconds=3.0, seconds=20.0, tokens=400.0,
    answered=12, shed=1, most_running=2, peak_anonymous=8 * 10**8, major_faults=40,
)  # fmt: skip
KILLED = Record(ending="killed", oom_kills=1, peak_anonymous=7 * 10**8)
SHORT = Load(seconds=1.0, prompt_words=(8, 8))  # one word may take many tokens of a tiny model


def entry(case: Case, record: Record) -> dict[str, Any]:
    return {"name": case.name, **asdict(case), **asdict(record)}


def test_a_case_replaces_its_earlier_self_and_no_other(tmp_path: Path) -> None:
    one, other = list(cases())[:2]
    file = tmp_path / "caps.json"
    for case, record in ((other, KILLED), (one, KILLED), (one, SERVED)):
        keep(file, entry(case, record))
    kept = read(file)
    assert [(item["name"], item["ending"]) for item in kept] == [
        (one.name, "served"), (other.name, "killed")
    ]  # fmt: skip
    table = caps.table(kept, LOADS[""]).markdown()
    assert "| 20 | 20.0 | 2 | 0 | 12 | 1 | 0 | 0 | 800 | 0 | 2 | 0 | 0.00 |" in table
    assert "| killed |" in table


@pytest.fixture
def small_case(tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case that serves the tiny pair instead of the big one."""
    try:
        with cgroup(f"specops-test-{os.getpid()}", memory=64 << 20):
            pass
    except CgroupError as error:
        pytest.skip(str(error))
    settings = replace(tiny_settings, threads=0)
    monkeypatch.setattr(capped, "prepared", lambda case, cache: settings)
    return Case("tinyllama", "int4", 0.7, swap=False)


@pytest.mark.e2e
def test_a_service_is_measured_under_a_real_cap(small_case: Case, tmp_path: Path) -> None:
    # Long enough for a look to meet a running request on a busy machine, too.
    outcome = measure(small_case, replace(SHORT, seconds=5.0), tmp_path)
    assert outcome.ending == "served"
    assert outcome.oom_kills == 0
    assert outcome.tokens > 0
    assert outcome.answered > 0
    assert outcome.failed_requests == 0
    assert 0 < outcome.peak_anonymous < 700 * 10**6
    assert (outcome.slots, outcome.context) == (3, 128)
    assert outcome.kv_tokens >= outcome.context
    assert outcome.most_running > 0


@pytest.mark.e2e
def test_a_full_queue_is_counted_and_no_failure(
    small_case: Case, tiny_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(tiny_settings, threads=0, slots=1, queue_size=0)
    monkeypatch.setattr(capped, "prepared", lambda case, cache: settings)
    outcome = measure(small_case, replace(SHORT, clients=4), tmp_path)
    assert outcome.shed > 0
    assert outcome.failed_requests == 0
    assert outcome.ending == "served"


@pytest.mark.e2e
def test_a_cap_that_nothing_fits_is_told_as_what_it_is(small_case: Case, tmp_path: Path) -> None:
    outcome = measure(replace(small_case, cap_gb=0.12), SHORT, tmp_path)
    assert outcome.tokens == 0
    assert outcome.ending in {"killed", "refused by the plan"}


def test_all_files_below_a_folder_leave_the_page_cache_whole(tmp_path: Path) -> None:
    files = [tmp_path / "graph", tmp_path / "weights" / "data"]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(os.urandom(1 << 20))
    assert all(cached(file, 0) for file in files)
    evict(tmp_path)
    if cached(files[0], 0):
        pytest.skip("files of this file system live in memory")
    assert not any(cached(file, 0) for file in files)
    assert all(file.stat().st_size == 1 << 20 for file in files)
