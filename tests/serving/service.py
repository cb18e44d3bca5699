"""The asynchronous engine with a real model, for tests of it and of what stands on it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from itertools import count
from threading import Event

import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.engine.model_info import ModelState, Report
from specops.metrics.metrics import Metrics
from specops.request import Output, Step
from specops.serving.async_engine import AsyncEngine
from specops.serving.request_handle import RequestHandle
from tests.waiting import PATIENCE


async def collect(handle: RequestHandle) -> list[Output]:
    """All outputs of the requests."""
    return [output async for outputs in handle.outputs() for output in outputs]


@cache
def shared_engine(settings: Settings) -> Engine:
    """An engine of these settings, loaded once for all tests of this process.

    What they ask stays in its prefix cache, its suffix history and its controller.
    """
    return Engine.load(settings)


def share(settings: Settings, report: Report | None = None) -> Engine:
    """`Engine.load` for tests that do not look at loading."""
    del report
    # Of which the service is another, but not the engine.
    return shared_engine(replace(settings, queue_size=0, request_timeout=1.0, drain_timeout=0.0))


@asynccontextmanager
async def serving(
    settings: Settings, load: Callable[[Settings, Report], Engine] = share
) -> AsyncIterator[tuple[AsyncEngine, Metrics]]:
    """The service as the server has it, once its model is loaded or has failed to."""
    metrics = Metrics()
    service = AsyncEngine(settings, metrics, load)
    service.start()
    try:
        while service.state not in (ModelState.READY, ModelState.FAILED):
            await asyncio.sleep(0.001)  # a large model takes minutes
        yield service, metrics
    finally:
        await service.stop()


def halt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Event:
    """Have an engine wait after three steps until the event is set: no request ends before that."""
    step, steps, may = engine.scheduler.step, count(), Event()

    def halting() -> Step:
        if next(steps) == 3:
            assert may.wait(PATIENCE)
        return step()

    monkeypatch.setattr(engine.scheduler, "step", halting)
    return may


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    """The value of one of the service's series."""
    value = metrics.registry.get_sample_value(f"specops_{name}", labels)
    assert value is not None, name
    return value
