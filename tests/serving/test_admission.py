"""Admission: who is refused and why, queue positions, and waits that follow earlier requests."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.request import FinishReason, GenerationRequest, GenerationStats
from specops.runtime.memory_plan import spare_bytes
from specops.serving.admission import CACHES_AHEAD, AdmissionController, QueueFull
from specops.serving.request_handle import QueuePosition
from specops.system.memory import Pressure

_ids = count()
GIB = 1 << 30
LIMIT = 4 * GIB


def request(tokens: int = 30) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{next(_ids)}", prompt_tokens=(1,), max_new_tokens=tokens - 1
    )


class Service:
    """A controller with memory and time that a test sets, and the reasons of its refusals."""

    def __init__(
        self, slots: int = 2, queue_size: int = 3, seconds: float = 0.0, kv_tokens: int = 1 << 20
    ) -> None:
        """`seconds`: how long an earlier request held its slot."""
        self.room, self.stalled, self.now = GIB, 0.0, 0.0  # bytes; seconds in all; seconds
        self.refused: list[str] = []
        self.controller = AdmissionController(
            slots,
            queue_size,
            kv_tokens,
            self.refused.append,
            room=lambda: self.room,
            pressure=lambda: Pressure(self.stalled, self.stalled),
            limit=LIMIT,
            clock=lambda: self.now,
        )
        self.learn(FinishReason.STOP, seconds)

    def enter(self, *requests: GenerationRequest) -> QueuePosition:
        return self.controller.enter(requests or [request()])

    def leave(self, *requests: GenerationRequest) -> None:
        for one in requests:
            self.controller.leave(one, FinishReason.CANCELLED, None)

    def learn(self, reason: FinishReason, seconds: float) -> None:
        ended = request()
        self.enter(ended)
        stats = GenerationStats(prefill_seconds=seconds / 4, decode_seconds=seconds * 3 / 4)
        self.controller.leave(ended, reason, stats)


def test_positions_count_from_the_slot_that_is_free_next() -> None:
    service = Service(slots=2)
    assert service.enter(request(), request(), request()).position == 0
    assert [service.enter().position for _ in range(2)] == [2, 3]


def test_the_wait_grows_with_the_requests_ahead() -> None:
    service = Service(slots=1, queue_size=2, seconds=2.0)
    # The running request counts as half done.
    assert [service.enter().wait_seconds for _ in range(3)] == [0.0, 1.0, 3.0]
    with pytest.raises(QueueFull, match="queue is full; try again in 3 s") as refused:
        service.enter()
    assert refused.value.retry_after == 3  # the wait for half of the queue, 5 s / 2, rounded up
    assert service.refused == ["queue_full"]


def test_the_wait_follows_completed_requests_only() -> None:
    service = Service(slots=1, seconds=2.0)
    for reason in (FinishReason.CANCELLED, FinishReason.TIMEOUT, FinishReason.ERROR):
        service.learn(reason, 1000.0)
    waiting = [request(), request()]
    service.enter(waiting[0])
    assert service.enter(waiting[1]).wait_seconds == 1.0
    service.leave(*waiting)
    for _ in range(200):
        service.learn(FinishReason.LENGTH, 20.0)
    service.enter()
    assert service.enter().wait_seconds == pytest.approx(10.0, rel=1e-3)


def test_reserved_room_is_kept_until_it_is_released() -> None:
    service = Service(slots=1, queue_size=1)
    releases = [service.controller.reserve() for _ in range(2)]
    for full in (service.enter, service.controller.reserve):
        with pytest.raises(QueueFull):
            full()
    releases[0]()
    releases[0]()  # does nothing
    service.enter()
    with pytest.raises(QueueFull):
        service.controller.reserve()


@given(st.lists(st.tuples(st.integers(2, 100), st.integers(0, 2)), max_size=60))
def test_counts_are_those_of_the_requests_in_flight(visits: list[tuple[int, int]]) -> None:
    service = Service(slots=2, queue_size=1000, seconds=2.0, kv_tokens=100)
    inside: list[GenerationRequest] = []
    for tokens, leaving in visits:
        coming = request(tokens)
        if inside and sum(one.tokens for one in inside) + tokens > CACHES_AHEAD * 100:
            with pytest.raises(QueueFull, match="KV cache"):
                service.enter(coming)
        else:
            queued = service.enter(coming)
            inside.append(coming)
            assert (queued.position > 0) == (len(inside) > 2) == (queued.wait_seconds > 0)
        service.leave(*inside[:leaving])
        del inside[:leaving]
    service.leave(*inside)
    assert service.enter() == QueuePosition(0, 0.0)


HALF_OF_THE_SPARE = spare_bytes(LIMIT) // 2
# Seconds that pass, bytes that can be allocated, seconds without progress, requests before
# this one, and why it is refused.
MEMORY = {
    "as planned": (1.0, spare_bytes(LIMIT), 0.0, 2, None),
    "something else grew": (1.0, HALF_OF_THE_SPARE - 1, 0.0, 2, "memory"),
    "a reading stays valid for a moment": (0.01, 0, 0.0, 2, None),
    "stalled most of the time": (1.0, GIB, 0.9, 2, "pressure"),
    "stalled, and a slot is free": (1.0, GIB, 0.9, 1, None),
    "a short stall": (0.2, GIB, 0.2, 2, None),
    "an idle service refuses nobody": (5.0, 0, 5.0, 0, None),
}


@pytest.mark.parametrize("case", MEMORY)
def test_memory_refuses_before_it_runs_out(case: str) -> None:
    seconds, room, stalled, before, reason = MEMORY[case]
    service = Service()
    for _ in range(before):
        service.enter()
    service.now += seconds
    service.room, service.stalled = room, stalled
    if reason is None:
        service.enter()
    else:
        with pytest.raises(QueueFull) as refused:
            service.enter()
        assert refused.value.reason == reason
    assert service.refused == ([] if reason is None else [reason])
    service.now += 2.0
    service.room = GIB  # no stall since
    service.enter()
