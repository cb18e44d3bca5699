"""The simulated replicas remember, share and queue as real ones do."""

from __future__ import annotations

import pytest

from bench.scale.envoy import Maglev
from bench.scale.model import Simulation, Told
from bench.scale.traffic import OUTPUT, Talk, requests, talks

ADDRESSES = [f"10.0.0.{number}:8000" for number in range(1, 7)]


def tokens(text: str) -> int:
    return len(text.split())


def told(plan: list[list[Talk]], size: int = 1, factor: int = 125) -> Told:
    return Simulation(Maglev(ADDRESSES[:size], factor), plan, tokens).told()


def test_a_conversation_is_computed_once() -> None:
    talk = Talk("one", "a b c ", ("d e", "f"))
    found = told([[talk]])
    second = 3 + 2 + OUTPUT + 1  # preamble, question, answer and the line's end
    assert found.requests == [2]
    assert found.cached == second / (5 + second + 1)
    assert found.possible == found.cached
    assert found.slowdown == pytest.approx(1.0)


def test_a_preamble_is_computed_once_by_each_replica() -> None:
    alone = [Talk(None, "a b c ", (f"q{number}",)) for number in range(4)]
    assert told([alone]).cached == 9 / 16
    apart = [Talk(str(number), "a b c ", ("q",)) for number in range(12)]
    spread = told([apart], 6)
    homes = sum(count > 0 for count in spread.requests)
    assert 1 < homes < 12
    assert spread.cached == (12 - homes) * 3 / 48
    assert spread.possible == 33 / 48


def test_more_than_fit_wait() -> None:
    one = Talk(None, "", ("a",))
    few, many = told([[one]] * 8), told([[one]] * 9)
    assert few.slowdown == pytest.approx(1 + 0.18 * 7)
    assert many.slowdown > few.slowdown


def test_every_request_is_answered_and_no_replica_has_too_many() -> None:
    plan = talks(18, 2, 4)
    bounded, unbounded = told(plan, 6), told(plan, 6, factor=0)
    assert sum(bounded.requests) == sum(unbounded.requests) == requests(plan)
    assert bounded.busiest < unbounded.busiest
    assert unbounded.at_home == 1.0
    assert bounded.at_home < 1.0
