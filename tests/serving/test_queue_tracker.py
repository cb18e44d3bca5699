"""The queue: positions of requests, and waits that follow the times of earlier requests."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.request import FinishReason, GenerationRequest, GenerationStats
from specops.serving.queue_tracker import QueuePosition, QueueTracker

_ids = count()


def request(prompt: int = 10, output: int = 20) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{next(_ids)}", prompt_tokens=(1,) * prompt, max_new_tokens=output
    )


def tracker(slots: int = 2, queue_size: int = 3, seconds: float = 0.0) -> QueueTracker:
    """Make a tracker after a request that held its slot for `seconds`."""
    made = QueueTracker(slots=slots, queue_size=queue_size)
    made.learn(FinishReason.STOP, held(seconds))
    return made


def held(seconds: float) -> GenerationStats:
    return GenerationStats(prefill_seconds=seconds / 4, decode_seconds=seconds * 3 / 4)


def test_positions_count_from_the_slot_that_is_free_next() -> None:
    here = tracker(slots=2)
    assert here.capacity == 5
    assert here.enter([request(), request(), request()]).position == 0
    assert [here.enter([request()]).position for _ in range(2)] == [2, 3]


def test_the_wait_grows_with_the_requests_ahead() -> None:
    here = tracker(slots=1, queue_size=10, seconds=2.0)
    # The running request counts as half done.
    assert [here.enter([request()]).wait_seconds for _ in range(3)] == [0.0, 1.0, 3.0]


def test_the_wait_follows_completed_requests_only() -> None:
    here = tracker(slots=1, seconds=2.0)
    for reason in (FinishReason.CANCELLED, FinishReason.TIMEOUT, FinishReason.ERROR):
        here.learn(reason, held(1000.0))
    here.enter([request()])
    assert here.enter([request()]).wait_seconds == 1.0
    for _ in range(200):
        here.learn(FinishReason.LENGTH, held(20.0))
    assert here.enter([request()]).wait_seconds == pytest.approx(30.0, rel=1e-3)


def test_retry_after_is_the_wait_for_half_of_the_queue_and_at_least_a_second() -> None:
    here = tracker(slots=1, queue_size=3, seconds=2.0)
    assert here.retry_after == 1
    for _ in range(4):
        here.enter([request()])
    assert here.retry_after == 4  # 2 s * 3.5 / 2, rounded up


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2)), max_size=60))
def test_counts_are_those_of_the_requests_in_flight(visits: list[tuple[int, int, int]]) -> None:
    here = tracker(slots=2, seconds=2.0)
    inside: dict[str, int] = {}
    for prompt, output, leaving in visits:
        coming = request(prompt, output)
        place = here.enter([coming])
        inside[coming.request_id] = prompt + output
        assert (place.position > 0) == (len(inside) > 2) == (place.wait_seconds > 0)
        for name in list(inside)[:leaving]:
            here.leave(name)
            del inside[name]
        assert (here.in_flight, here.tokens) == (len(inside), sum(inside.values()))
    for name in inside:
        here.leave(name)
    assert here.enter([request()]) == QueuePosition(0, 0.0)
