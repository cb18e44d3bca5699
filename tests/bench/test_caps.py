"""The cap table: what is measured under a real cap, kept case by case and drawn."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench import caps
from bench.caps import Case, Outcome, cases, draw, keep, measure, read
from bench.cgroup import CgroupError, cgroup
from specops.config import Settings

SERVED = Outcome(
    rows=4, context=2048, start_seconds=3.0, seconds=20.0, tokens=400.0, peak_anonymous=8 * 10**8,
    major_faults=40,
)  # fmt: skip
KILLED = Outcome(ending="killed", oom_kills=1, peak_anonymous=7 * 10**8)


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert "int4-1.0GB-mapped-noswap" in names


def test_a_case_replaces_its_earlier_self_and_no_other(tmp_path: Path) -> None:
    one, other = list(cases())[:2]
    keep(one, KILLED, tmp_path)
    keep(other, KILLED, tmp_path)
    keep(one, SERVED, tmp_path)
    kept = {entry["name"]: entry["ending"] for entry in read(tmp_path)}
    assert kept == {one.name: "served", other.name: "killed"}
    table = (tmp_path / "caps.md").read_text()
    assert "| 20.0 | 800 | 0 | 2 | 0 |" in table
    assert "| killed |" in table


def test_the_picture_shows_what_was_served_and_what_was_not(tmp_path: Path) -> None:
    first, second, *_ = cases()
    keep(first, SERVED, tmp_path)
    keep(second, KILLED, tmp_path)
    draw(read(tmp_path), tmp_path / "caps.png")
    assert (tmp_path / "caps.png").read_bytes().startswith(b"\x89PNG")


def test_files_leave_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(1 << 20))
    caps._evict(tmp_path)
    assert file.stat().st_size == 1 << 20


@pytest.fixture
def small_case(tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case that serves the tiny pair instead of the big one."""
    try:
        with cgroup(f"specops-test-{os.getpid()}", memory=64 << 20):
            pass
    except CgroupError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(caps, "_settings", lambda case, cache: replace(tiny_settings, threads=0))
    monkeypatch.setattr(caps, "_PROMPT_WORDS", 8)  # one word may take many of its tokens
    return Case("int4", 0.7, mapped=True, swap=False)


@pytest.mark.e2e
def test_a_service_is_measured_under_a_real_cap(small_case: Case, tmp_path: Path) -> None:
    outcome = measure(small_case, 1.0, tmp_path)
    assert outcome.ending == "served"
    assert outcome.oom_kills == 0
    assert outcome.tokens > 0
    assert outcome.failed_requests == 0
    assert 0 < outcome.peak_anonymous < 700 * 10**6
    assert (outcome.rows, outcome.context) == (3, 128)
    json.dumps(outcome.tokens_per_second)


@pytest.mark.e2e
def test_a_cap_that_nothing_fits_is_told_as_what_it_is(small_case: Case, tmp_path: Path) -> None:
    outcome = measure(replace(small_case, cap_gb=0.12), 1.0, tmp_path)
    assert outcome.tokens == 0
    assert outcome.ending in {"killed", "refused by the plan"}
