"""The gate refuses by tokens, memory and stalls, but never refuses a request of an idle service."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from specops.config import Settings
from specops.runtime.memory_plan import spare_bytes
from specops.serving.admission import QueueFull
from specops.serving.memory_gate import CACHES_AHEAD, MemoryGate, Shed
from specops.system.memory import Pressure
from tests.serving.test_async_engine import collect, request, sample, serving

pytestmark = pytest.mark.anyio
LIMIT = 4 << 30
KV_TOKENS, SLOTS = 1000, 2
BUSY = {"promised_tokens": 100, "tokens": 10, "in_flight": SLOTS}


class Machine:
    """Memory and time that a test sets."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.stalled = 0.0  # seconds in all
        self.now = 0.0

    def gate(self) -> MemoryGate:
        return MemoryGate(
            KV_TOKENS,
            SLOTS,
            room=lambda: self.room,
            pressure=lambda: Pressure(self.stalled, self.stalled),
            limit=LIMIT,
            clock=lambda: self.now,
        )


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_requests_are_refused_before_memory_reaches_the_cap(machine: Machine) -> None:
    gate = machine.gate()
    machine.room, machine.now = spare_bytes(LIMIT), 1.0  # a full service as it was planned
    assert gate.refusal(**BUSY) is None
    machine.room, machine.now = spare_bytes(LIMIT) // 2 - 1, 2.0
    assert gate.refusal(**BUSY) is Shed.MEMORY
    machine.room, machine.now = 1 << 30, 3.0
    assert gate.refusal(**BUSY) is None


def test_a_machine_that_waits_for_memory_fills_slots_but_no_queue(machine: Machine) -> None:
    gate = machine.gate()
    machine.stalled, machine.now = 0.9, 1.0
    assert gate.refusal(**BUSY) is Shed.PRESSURE
    assert gate.refusal(**{**BUSY, "in_flight": SLOTS - 1}) is None
    machine.now = 3.0  # no stall since
    assert gate.refusal(**BUSY) is None


def test_a_short_stall_is_no_reason(machine: Machine) -> None:
    gate = machine.gate()
    machine.stalled, machine.now = 0.2, 0.2
    assert gate.refusal(**BUSY) is None
    machine.now = 1.0
    assert gate.refusal(**BUSY) is None


def test_an_idle_service_refuses_no_request(machine: Machine) -> None:
    gate = machine.gate()
    machine.room, machine.stalled, machine.now = 0, 100.0, 5.0
    assert gate.refusal(promised_tokens=0, tokens=10**6, in_flight=0) is None


def test_memory_is_not_read_for_every_request(machine: Machine) -> None:
    gate = machine.gate()
    machine.room, machine.now = 0, 0.01
    assert gate.refusal(**BUSY) is None
    machine.now = 0.2
    assert gate.refusal(**BUSY) is Shed.MEMORY


async def test_the_service_sheds_and_counts_by_reason(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    monkeypatch.setattr("specops.serving.async_engine.MemoryGate", lambda *_: machine.gate())

    async with serving(replace(tiny_settings, queue_size=50)) as (service, metrics):
        first = service.submit(request(max_new_tokens=100))
        machine.room, machine.now = 0, 1.0
        with pytest.raises(QueueFull, match="memory is running out") as refused:
            service.submit(request())
        assert refused.value.retry_after >= 1
        assert sample(metrics, "requests_rejected_total", reason="memory") == 1
        assert sample(metrics, "requests_rejected_total", reason="queue_full") == 0
        await collect(first)
        await collect(service.submit(request()))  # idle again


async def test_the_service_bounds_the_tokens_that_it_promises(tiny_settings: Settings) -> None:
    async with serving(replace(tiny_settings, queue_size=1000)) as (service, metrics):
        most = CACHES_AHEAD * 3 * 128
        handles = [service.submit(request(max_new_tokens=125)) for _ in range(most // 128)]
        with pytest.raises(QueueFull, match="KV cache"):
            service.submit(request(max_new_tokens=125))
        assert sample(metrics, "requests_rejected_total", reason="kv_tokens") == 1
        for handle in handles:
            handle.cancel()
        await asyncio.gather(*(collect(handle) for handle in handles))
