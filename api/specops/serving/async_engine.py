"""What stands between HTTP and the engine: requests are admitted, their tokens are handed out.

HTTP handlers live on the event loop; the engine has a thread of its own (`engine_thread`). The
asynchronous engine admits requests, hands every request its new tokens after a step, and turns the
step's numbers into metrics: all of it on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from specops.config import Settings
from specops.engine.engine import Download, Engine, ModelInfo, ModelState, Report
from specops.engine.scheduler import Scheduler
from specops.metrics.metrics import Metrics
from specops.request import FinishReason, GenerationRequest, Output, PromptTooLong, StepResult
from specops.serving.admission import AdmissionController
from specops.serving.engine_thread import EngineThread
from specops.serving.memory_gate import MemoryGate
from specops.serving.queue_tracker import QueueTracker
from specops.serving.request_handle import InFlight, RequestHandle
from specops.system.allocator import give_back

_REST_SECONDS = 15.0  # without a request, after which free memory goes back to the system
log = logging.getLogger(__name__)

__all__ = [
    "AsyncEngine",
    "ModelInfo",
    "ModelState",
    "NotReady",
    "PromptTooLong",
    "RequestHandle",
]


class NotReady(Exception):  # noqa: N818 - a state, not a fault
    """The model is not loaded yet, or not any more."""

    def __init__(self, state: ModelState, message: str) -> None:
        super().__init__(message)
        self.state = state
        self.message = message


class AsyncEngine:
    """Loads the model in the background, then serves requests one step after another.

    Attributes:
        state: how far the model is.
        detail: what is being done.
        error: why the state is failed.
        info: the model, once it is ready.
        crashed: set where the engine has failed after it had served.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        load: Callable[[Settings, Report], Engine] = Engine.load,
    ) -> None:
        self.state = ModelState.STARTING
        self.detail = ""
        self.error: str | None = None
        self.info: ModelInfo | None = None
        self.crashed = asyncio.Event()
        self.running = 0
        self.waiting = 0
        self._settings = settings
        self._metrics = metrics
        self._engine: Engine | None = None
        self._admission: AdmissionController | None = None
        self._in_flight: dict[str, InFlight] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._rest: asyncio.TimerHandle | None = None  # since the last request
        self._thread = EngineThread(
            lambda: load(settings, self._report),
            loaded=self._loaded,
            stepped=self._deliver,
            failed=self._failed,
        )

    @property
    def alive(self) -> bool:
        """The engine's thread works, or was told to end."""
        return self._thread.alive or self.state in (ModelState.STARTING, ModelState.DRAINING)

    def start(self) -> None:
        """Start the engine's thread; call on the event loop."""
        self._set_state(ModelState.STARTING, "")
        self._thread.start()

    async def stop(self) -> None:
        """Refuse new requests, let the running ones finish in time, end the thread."""
        if self.state not in (ModelState.FAILED, ModelState.DRAINING):
            self._set_state(ModelState.DRAINING, "finishing the running requests")
        try:
            await asyncio.wait_for(self._idle.wait(), self._settings.drain_timeout)
        except TimeoutError:
            log.warning("%d requests did not finish in time", len(self._in_flight))
        await self._thread.stop()

    @property
    def engine(self) -> Engine:
        """The loaded model, for what any thread may use: tokenizer, chat template, `encode`.

        Raises:
            NotReady: the model is loading, draining or failed.
        """
        if self.state is not ModelState.READY or self._engine is None:
            message = self.error or f"the model is not ready: {self.state.value} {self.detail}"
            raise NotReady(self.state, message.strip())
        return self._engine

    @property
    def admission(self) -> AdmissionController:
        """Admits requests; for the event loop alone.

        Raises:
            NotReady: no model is loaded.
        """
        if self._admission is None:
            raise NotReady(self.state, "no model is loaded")
        return self._admission

    def submit(self, *requests: GenerationRequest) -> RequestHandle:
        """Queue requests, all or none; call on the event loop.

        Raises:
            NotReady: the model is loading, draining or failed.
            PromptTooLong: a prompt leaves no room for an answer.
            QueueFull: see `AdmissionController.check`.
        """
        engine = self.engine
        try:
            requests = tuple(self._with_times(engine.admit(request)) for request in requests)
        except PromptTooLong:
            self._metrics.observe_rejected("prompt_too_long")
            raise
        if taken := [item for item in requests if item.request_id in self._in_flight]:
            raise ValueError(f"request {taken[0].request_id} is already running")
        position = self.admission.enter(requests)
        handle = RequestHandle(requests, position, lambda: self._cancel(requests))
        self._idle.clear()
        if self._rest is not None:
            self._rest.cancel()
        for request in requests:
            self._in_flight[request.request_id] = InFlight(request, handle)
            self.waiting += 1  # until the next step tells
            self._thread.add(request)
        return handle

    def _cancel(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.request_id in self._in_flight:
                self._thread.cancel(request.request_id)

    def _with_times(self, request: GenerationRequest) -> GenerationRequest:
        arrival = request.arrival or time.monotonic()
        return replace(
            request,
            arrival=arrival,
            deadline=min(request.deadline, arrival + self._settings.request_timeout),
        )

    def _set_state(self, state: ModelState, detail: str) -> None:
        self.state, self.detail = state, detail
        self._metrics.set_state(state.value)
        log.info("model is %s %s", state.value, detail)

    def _report(self, state: ModelState, detail: str, download: Download | None = None) -> None:
        """Take a report of the load, on the engine's thread."""
        self._thread.on_loop(lambda: self._progress(state, detail, download))

    def _progress(self, state: ModelState, detail: str, download: Download | None = None) -> None:
        if download is not None:
            self._metrics.set_download(download.model, download.done, download.total)
            if state is self.state:  # every half second: not a line of the log each
                self.detail = detail
                return
        if self.state is not ModelState.DRAINING:
            self._set_state(state, detail)

    def _loaded(self, engine: Engine) -> None:
        self._engine, self.info = engine, engine.info
        info, scheduler = engine.info, engine.scheduler
        self._metrics.set_model(_labels(info))
        self._metrics.set_slots(info.slots)
        self._metrics.set_kv_capacity(info.kv_tokens, scheduler.target.cache.num_blocks)
        tracker = QueueTracker(slots=info.slots, queue_size=self._settings.queue_size)
        gate = MemoryGate(info.kv_tokens, info.slots)
        self._admission = AdmissionController(tracker, gate, self._metrics.observe_rejected)
        controller = scheduler.controller
        self._metrics.watch_controller(
            lambda: controller.estimated_speedup, lambda: _pass_costs(scheduler)
        )
        self._progress(ModelState.READY, "")

    def _failed(self, message: str) -> None:
        self.error = message
        self._set_state(ModelState.FAILED, "")
        for flight in list(self._in_flight.values()):
            output = Output(flight.request.request_id, finish=FinishReason.ERROR, error=message)
            self._finish(flight, output)
        self.running = self.waiting = 0
        if self.info is not None:
            self.crashed.set()

    def _deliver(self, now: float, result: StepResult) -> None:
        for output in result.outputs:
            flight = self._in_flight[output.request_id]
            if output.pieces:
                if flight.first_output_at is None:
                    flight.first_output_at = now
                else:
                    passed = now - flight.last_output_at
                    self._metrics.observe_inter_token(passed, len(output.pieces))
                flight.last_output_at = now
            if output.finish:
                self._finish(flight, output)
            else:
                flight.handle.deliver(output)
        if result.stats is not None:
            self._metrics.observe_step(result.stats)
        self.running = result.running
        self.waiting = len(self._in_flight) - result.running
        # The scheduler does not see what came in during its step.
        self._metrics.observe_step_result(replace(result, waiting=self.waiting))

    def _finish(self, flight: InFlight, output: Output) -> None:
        request, first = flight.request, flight.first_output_at
        del self._in_flight[request.request_id]
        latency = time.monotonic() - request.arrival
        ttft = None if first is None else first - request.arrival
        reason = output.finish or FinishReason.ERROR
        self._metrics.observe_finish(reason, output.stats, latency, ttft)
        if output.stats is not None:
            self._metrics.observe_queue_wait(output.stats.queue_seconds)
        self.admission.leave(request.request_id, reason, output.stats)
        if not self._in_flight:
            self._idle.set()
            self._rest = asyncio.get_running_loop().call_later(_REST_SECONDS, give_back)
        flight.handle.deliver(output)


def _pass_costs(scheduler: Scheduler) -> Iterator[tuple[str, int, float]]:
    """Kind, size and seconds of the target's passes, then of the draft model's."""
    yield from scheduler.cost_model.table()
    if scheduler.draft_cost_model is not None:
        yield from scheduler.draft_cost_model.table("draft_tokens")


def _labels(info: ModelInfo) -> dict[str, str]:
    return {
        "name": info.name,
        "quant": info.quant,
        "parameters": str(info.parameters),
        "draft_parameters": str(info.draft_parameters or 0),
        "drafters": ",".join(info.drafters),
        "default_drafter": info.default_drafter,
        "context": str(info.context),
        "slots": str(info.slots),
        "kv_dtype": info.kv_dtype,
        "threads": str(info.threads),
        "kernels": info.kernels,
        "batch_invariant": str(info.batch_invariant).lower(),
    }
