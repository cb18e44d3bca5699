"""The simulated fleet keeps the laws that queues obey."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench import fleet, queueing
from bench.fleet import main, served
from bench.machine import describe
from bench.queueing import QUEUE, ROUTES, Replica, capacity, simulate
from specops.config import Settings

TIMES = [2.0, 2.4, 3.0, 3.6]  # seconds of a request with 1 to 4 at once
SPEEDS = [1.0, *(TIMES[0] / seconds for seconds in TIMES)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queueing, "_LEAST_REQUESTS", 8000)


def test_a_request_alone_takes_its_own_time() -> None:
    replica = Replica(SPEEDS)
    assert replica.offer(10.0, 2.0)
    assert replica.next_end() == 12.0
    assert replica.finish(12.0) == 10.0
    assert replica.next_end() is None


def test_requests_at_once_slow_each_other_down_as_measured() -> None:
    replica = Replica(SPEEDS)
    for _ in range(4):
        assert replica.offer(0.0, TIMES[0])
    assert replica.next_end() == pytest.approx(TIMES[3])


def test_the_first_that_waits_takes_the_slot_that_gets_free() -> None:
    replica = Replica(SPEEDS)
    for number in range(6):
        assert replica.offer(number / 10, 2.0 + number)
    assert len(replica.waiting) == 2
    end = replica.next_end()
    assert end is not None
    assert replica.finish(end) == 0.0
    assert sorted(arrival for _, arrival in replica.work) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_full_queue_refuses() -> None:
    replica = Replica(SPEEDS)
    taken = [replica.offer(0.0, 1.0) for _ in range(4 + QUEUE + 3)]
    assert taken == [True] * (4 + QUEUE) + [False] * 3


def test_a_fleet_that_is_hardly_loaded_answers_in_a_requests_own_time() -> None:
    found = simulate(TIMES, 10, "shorter of two", 0.05)
    assert found.refused == 0
    # Exponential work: the median is ln 2 of the mean.
    assert found.median == pytest.approx(0.693 * TIMES[0], rel=0.1)


def test_what_comes_in_goes_out_as_long_as_it_fits() -> None:
    found = simulate(TIMES, 10, "at random", 0.6)
    assert found.refused == 0
    assert found.requests_per_second == pytest.approx(0.6 * 10 * capacity(TIMES), rel=0.05)


def test_an_overloaded_fleet_does_what_it_can_and_refuses_the_rest() -> None:
    found = simulate(TIMES, 10, "shorter of two", 1.5)
    assert found.requests_per_second == pytest.approx(10 * capacity(TIMES), rel=0.05)
    assert found.refused == pytest.approx(1 / 3, abs=0.05)


def test_looking_at_two_queues_beats_chance() -> None:
    chance, two = (simulate(TIMES, 20, route, 0.9) for route in ("at random", "shorter of two"))
    assert two.p95 < chance.p95
    assert two.refused <= chance.refused


def test_the_same_seed_plays_the_same_load() -> None:
    for route in ROUTES:
        assert simulate(TIMES, 10, route, 0.8) == simulate(TIMES, 10, route, 0.8)


def test_the_command_draws_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet, "REPLICAS", (10,))
    monkeypatch.setattr(queueing, "_REQUESTS_PER_REPLICA", 30)
    times = {str(count): [seconds] for count, seconds in enumerate(TIMES, 1)}
    (tmp_path / "service-times.json").write_text(
        json.dumps({"machine": asdict(describe()), "seconds_by_clients": times})
    )
    picture = tmp_path / "sizing.png"
    assert main(["simulate", "--results", str(tmp_path), "--picture", str(picture)]) == 0
    assert f"{capacity(TIMES):.3f} requests/s" in capsys.readouterr().out
    runs = json.loads((tmp_path / "sizing.json").read_text())["runs"]
    assert len(runs) == len(ROUTES) * len(fleet.LOADS)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
def test_a_service_is_timed_with_one_client_and_with_many(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "SLOTS", 2)
    monkeypatch.setattr(fleet, "_SETTLE_SECONDS", 0.2)
    monkeypatch.setattr(fleet, "_PROMPT_WORDS", 4)  # one word may take many of its tokens
    monkeypatch.setattr(fleet, "_NEW_TOKENS", 16)
    found = served(replace(tiny_settings, threads=0), 0.5)
    assert list(found) == ["1", "2"]
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())
