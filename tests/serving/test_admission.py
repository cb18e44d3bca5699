"""Admission: positions of requests, and waits that follow the times of earlier requests."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.request import FinishReason, GenerationRequest, GenerationStats
from specops.serving.admission import AdmissionController, QueueFull
from specops.serving.memory_gate import MemoryGate
from specops.serving.request_handle import QueuePosition

_ids = count()
GIB = 1 << 30


def request(tokens: int = 30) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{next(_ids)}", prompt_tokens=(1,), max_new_tokens=tokens - 1
    )


def controller(
    slots: int = 2, queue_size: int = 3, seconds: float = 0.0, kv_tokens: int = 1 << 20
) -> AdmissionController:
    """Make a controller after a request that held its slot for `seconds`."""
    gate = MemoryGate(kv_tokens, slots, room=lambda: GIB, pressure=lambda: None, limit=GIB)
    made = AdmissionController(slots, queue_size, gate, lambda reason: None)
    learn(made, FinishReason.STOP, seconds)
    return made


def learn(admission: AdmissionController, reason: FinishReason, seconds: float) -> None:
    ended = request()
    admission.enter([ended])
    stats = GenerationStats(prefill_seconds=seconds / 4, decode_seconds=seconds * 3 / 4)
    admission.leave(ended.request_id, reason, stats)


def test_positions_count_from_the_slot_that_is_free_next() -> None:
    here = controller(slots=2)
    assert here.enter([request(), request(), request()]).position == 0
    assert [here.enter([request()]).position for _ in range(2)] == [2, 3]


def test_the_wait_grows_with_the_requests_ahead() -> None:
    here = controller(slots=1, queue_size=2, seconds=2.0)
    # The running request counts as half done.
    assert [here.enter([request()]).wait_seconds for _ in range(3)] == [0.0, 1.0, 3.0]
    with pytest.raises(QueueFull) as refused:
        here.check(1)
    assert refused.value.retry_after == 3  # the wait for half of the queue, 5 s / 2, rounded up


def test_the_wait_follows_completed_requests_only() -> None:
    here = controller(slots=1, seconds=2.0)
    for reason in (FinishReason.CANCELLED, FinishReason.TIMEOUT, FinishReason.ERROR):
        learn(here, reason, 1000.0)
    waiting = [request(), request()]
    here.enter(waiting[:1])
    assert here.enter(waiting[1:]).wait_seconds == 1.0
    for one in waiting:
        here.leave(one.request_id, FinishReason.CANCELLED, None)
    for _ in range(200):
        learn(here, FinishReason.LENGTH, 20.0)
    here.enter([request()])
    assert here.enter([request()]).wait_seconds == pytest.approx(10.0, rel=1e-3)


@given(st.lists(st.tuples(st.integers(2, 100), st.integers(0, 2)), max_size=60))
def test_counts_are_those_of_the_requests_in_flight(visits: list[tuple[int, int]]) -> None:
    here = controller(slots=2, queue_size=1000, seconds=2.0, kv_tokens=100)
    inside: dict[str, int] = {}
    for tokens, leaving in visits:
        coming = request(tokens)
        if inside and sum(inside.values()) + tokens > 800:  # eight times the KV cache
            with pytest.raises(QueueFull, match="KV cache"):
                here.enter([coming])
        else:
            place = here.enter([coming])
            inside[coming.request_id] = tokens
            assert (place.position > 0) == (len(inside) > 2) == (place.wait_seconds > 0)
        for name in list(inside)[:leaving]:
            here.leave(name, FinishReason.CANCELLED, None)
            del inside[name]
    for name in inside:
        here.leave(name, FinishReason.CANCELLED, None)
    assert here.enter([request()]) == QueuePosition(0, 0.0)
