"""The cap table: what is measured under a real cap, kept case by case and drawn."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench import capped, caps
from bench.capped import Case, Load, Outcome, Sample, measure
from bench.caps import AT_ONCE, cases, keep, main, read, soak_charts, table_charts
from bench.cgroup import CgroupError, cgroup
from bench.server import Client, RefusedError
from specops.config import Settings

SERVED = Outcome(
    slots=8, context=2048, kv_tokens=4096, start_seconds=3.0, seconds=20.0, tokens=400.0,
    answered=12, shed=1, most_running=2, peak_anonymous=8 * 10**8, major_faults=40,
)  # fmt: skip
KILLED = Outcome(ending="killed", oom_kills=1, peak_anonymous=7 * 10**8)
SHORT = Load(seconds=1.0, prompt_words=(8, 8))  # one word may take many tokens of a tiny model


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert "tinyllama-int4-1.0GB-noswap" in names


def test_a_case_replaces_its_earlier_self_and_no_other(tmp_path: Path) -> None:
    one, other = list(cases())[:2]
    keep(one, KILLED, tmp_path)
    keep(other, KILLED, tmp_path)
    keep(one, SERVED, tmp_path)
    kept = {entry["name"]: entry["ending"] for entry in read(tmp_path)}
    assert kept == {one.name: "served", other.name: "killed"}
    table = (tmp_path / "caps.md").read_text()
    assert "| 20 | 20.0 | 2 | 0 | 12 | 1 | 0 | 0 | 800 | 0 | 2 | 0 | 0.00 |" in table
    assert "| killed |" in table


def test_the_picture_has_a_bar_for_what_was_served_and_none_for_what_was_killed(
    tmp_path: Path,
) -> None:
    without, swap, *_ = cases()
    keep(without, SERVED, tmp_path)
    keep(swap, KILLED, tmp_path)
    (chart,) = table_charts(read(tmp_path))
    bars = {series.name: series.values[0] for series in chart.series}
    assert bars["no swap"] == 20.0
    assert bars["swap"] is None
    assert (tmp_path / "caps.png").read_bytes().startswith(b"\x89PNG")


def test_a_soak_is_kept_apart_and_shown_over_time(tmp_path: Path) -> None:
    samples = [
        Sample(seconds=5.0 * number, tokens=100.0 * number, anonymous=10**8, file=2 * 10**8,
               swap=0, major_faults=number)
        for number in range(4)
    ]  # fmt: skip
    keep(next(cases()), replace(SERVED, samples=samples), tmp_path, "caps-soak")
    assert read(tmp_path) == []
    memory, speed = soak_charts(read(tmp_path, "caps-soak"))
    assert [series.values for series in memory.series] == [[100.0] * 4, [200.0] * 4, [0.0] * 4]
    assert speed.series[0].values == [20.0] * 3
    assert (tmp_path / "caps-soak.png").exists()


def test_what_was_kept_of_a_case_that_is_no_more_is_left_out(tmp_path: Path) -> None:
    keep(next(cases()), SERVED, tmp_path)
    kept = json.loads((tmp_path / "caps.json").read_text())
    kept["cases"].append({**kept["cases"][0], "name": "tinyllama-int4-4.0GB-copied"})
    (tmp_path / "caps.json").write_text(json.dumps(kept))
    assert [entry["name"] for entry in read(tmp_path)] == [next(cases()).name]


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (replace(SERVED, most_running=AT_ONCE), 0),
        (replace(SERVED, most_running=AT_ONCE - 1), 1),
        (replace(KILLED, most_running=AT_ONCE), 1),
    ],
)
def test_enough_requests_at_once_and_nobody_killed_is_what_is_wanted(
    outcome: Outcome, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []

    def note(case: Case, load: Load, cache: Path) -> Outcome:
        loads.append(load)
        return outcome

    monkeypatch.setattr(caps, "measure", note)
    asked = ["--at-once", "--only", "int4-1.0GB-noswap", "--seconds", "60"]
    assert main([*asked, "--results", str(tmp_path)]) == status
    (load,) = loads
    assert (load.clients, load.new_tokens, load.seconds) == (AT_ONCE, (64, 64), 60)
    assert read(tmp_path, "caps-at-once")[0]["most_running"] == outcome.most_running


def test_only_what_is_missing_is_measured_and_no_more_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def note(case: Case, load: Load, cache: Path) -> Outcome:
        measured.append(case.name)
        return SERVED

    monkeypatch.setattr(caps, "measure", note)
    asked = ["--only", "noswap", "--missing", "--most", "2", "--results", str(tmp_path)]
    assert main(asked) == 0
    assert main(asked) == 0
    wanted = [case.name for case in cases() if not case.swap]
    assert measured == wanted[:4]


def test_what_was_disturbed_is_still_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = [replace(SERVED, strangers=1.0), SERVED, SERVED]
    monkeypatch.setattr(caps, "measure", lambda case, load, cache: outcomes.pop(0))
    asked = ["--only", "int8-1.5GB-noswap", "--missing", "--results", str(tmp_path)]
    for left in (2, 1, 1):
        assert main(asked) == 0
        assert len(outcomes) == left


@pytest.mark.parametrize(("status", "told"), [(429, "shed"), (504, "late"), (500, "failed")])
def test_what_has_become_of_a_request_goes_by_its_status(
    status: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(client: Client, body: object) -> None:
        raise RefusedError(status, "said so")

    monkeypatch.setattr(Client, "generate", generate)
    assert capped._ask(Client(1), {}) == told


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
    outcome = measure(small_case, replace(SHORT, sample_every=0.2), tmp_path)
    assert outcome.ending == "served"
    assert outcome.oom_kills == 0
    assert outcome.tokens > 0
    assert outcome.answered > 0
    assert outcome.failed_requests == 0
    assert 0 < outcome.peak_anonymous < 700 * 10**6
    assert (outcome.slots, outcome.context) == (3, 128)
    assert outcome.kv_tokens >= outcome.context
    assert outcome.most_running > 0
    assert 0 < outcome.samples[0].anonymous <= outcome.peak_anonymous
    json.dumps(outcome.tokens_per_second)


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
