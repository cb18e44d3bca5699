"""Serves requests on the event loop, with the engine on a thread of its own (`engine_thread`).

The asynchronous engine admits requests, hands each request its new tokens after a step, and counts
each step in the metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from specops.config import Settings
from specops.engine.engine import Engine, UnknownToken
from specops.engine.model_info import Download, ModelInfo, ModelState, Report
from specops.engine.scheduler import Scheduler
from specops.metrics.metrics import Metrics
from specops.request import FinishReason, GenerationRequest, Output, PromptTooLong, StepResult
from specops.serving.admission import AdmissionController
from specops.serving.engine_thread import EngineThread
from specops.serving.memory_gate import MemoryGate
from specops.serving.request_handle import RequestHandle
from specops.system.allocator import give_back

_REST_SECONDS = 15.0  # after this time without a request, free memory goes back to the system
_LABELS = (
    *("name", "quant", "parameters", "default_drafter", "context", "slots"),
    *("kv_dtype", "threads", "kernels"),
)
log = logging.getLogger(__name__)


class NotReady(Exception):  # noqa: N818 - a state, not a fault
    """The model is not loaded yet, or no longer serves."""

    def __init__(self, state: ModelState, message: str) -> None:
        super().__init__(message)
        self.state = state
        self.message = message


@dataclass(slots=True)
class _InFlight:
    """An admitted request that has not ended."""

    request: GenerationRequest
    handle: RequestHandle
    first_output_at: float | None = None
    last_output_at: float = 0.0


class AsyncEngine:
    """Loads the model in the background, then serves requests step by step.

    Attributes:
        state: state of the model.
        detail: what the engine does in this state.
        error: why the state is failed.
        info: description of the model; None until it is ready.
        crashed: set if the engine has failed after the model was ready.
        running: number of requests that hold a slot.
        waiting: number of requests that wait for a slot.
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
        self._in_flight: dict[str, _InFlight] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._rest: asyncio.TimerHandle | None = None  # started when the last request ended
        self._thread = EngineThread(
            lambda: load(settings, self._report),
            loaded=self._loaded,
            stepped=self._deliver,
            failed=self._failed,
            failures=metrics.failures,
        )

    @property
    def alive(self) -> bool:
        """Whether the engine's thread works, or ends because it was told to."""
        return self._thread.alive or self.state in (ModelState.STARTING, ModelState.DRAINING)

    def start(self) -> None:
        """Start the engine's thread; call on the event loop."""
        self._set_state(ModelState.STARTING, "")
        self._thread.start()

    async def stop(self) -> None:
        """Refuse new requests, let the running requests finish in time, end the thread."""
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
        """Admits requests; call it on the event loop only.

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
            UnknownToken: a prompt has a token that the model does not have.
            QueueFull: see `AdmissionController.check`.
        """
        engine = self.engine
        try:
            requests = tuple(self._with_times(engine.admit(request)) for request in requests)
        except PromptTooLong:
            self._metrics.observe_rejected("prompt_too_long")
            raise
        except UnknownToken:
            self._metrics.observe_rejected("invalid")
            raise
        position = self.admission.enter(requests)
        handle = RequestHandle(
            requests, position, lambda: self._cancel(requests), self._thread.stop_answer
        )
        self._idle.clear()
        if self._rest is not None:
            self._rest.cancel()
        for request in requests:
            self._in_flight[request.request_id] = _InFlight(request, handle)
            if request.trace is not None:
                request.trace.submitted(request)
            self.waiting += 1  # until the next step says how many requests run
            self._thread.add(request)
            with self._metrics.failures.contained("engine"):
                self._metrics.observe_admitted(request)
        return handle

    def _cancel(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.request_id in self._in_flight:
                self._thread.cancel(request.request_id)

    def _with_times(self, request: GenerationRequest) -> GenerationRequest:
        arrival = request.arrival or time.monotonic()
        deadline = min(request.deadline, arrival + self._settings.request_timeout)
        return replace(request, arrival=arrival, deadline=deadline)

    def _set_state(self, state: ModelState, detail: str) -> None:
        self.state, self.detail = state, detail
        self._metrics.set_state(state.value)
        log.info("model is %s%s", state.value, f": {detail}" if detail else "")

    # -- what the engine's thread reports ----------------------------------------------------------

    def _report(self, state: ModelState, detail: str, download: Download | None = None) -> None:
        self._thread.on_loop(lambda: self._progress(state, detail, download))

    def _progress(self, state: ModelState, detail: str, download: Download | None = None) -> None:
        if download is not None:
            self._metrics.set_download(download.model, download.done, download.total)
            if state is self.state:  # such reports come twice a second: too often for the log
                self.detail = detail
                return
        if self.state is not ModelState.DRAINING:
            self._set_state(state, detail)

    def _loaded(self, engine: Engine) -> None:
        try:
            self._serve_with(engine)
        except Exception as error:  # nobody would ever be answered
            self._metrics.failures.report("engine", error)
            self._failed(str(error) or repr(error))

    def _serve_with(self, engine: Engine) -> None:
        info, scheduler = engine.info, engine.scheduler
        self._engine, self.info = engine, info
        labels = {name: str(getattr(info, name)) for name in _LABELS} | {
            "drafters": ",".join(info.drafters),
            "draft_parameters": str(info.draft_parameters or 0),
            "batch_invariant": str(info.batch_invariant).lower(),
        }
        blocks = scheduler.target.cache.num_blocks
        self._metrics.set_model(labels, info.slots, info.kv_tokens, blocks)
        self._admission = AdmissionController(
            info.slots,
            self._settings.queue_size,
            MemoryGate(info.kv_tokens, info.slots),
            self._metrics.observe_rejected,
        )
        controller = scheduler.controller
        self._metrics.watch_controller(
            lambda: controller.estimated_speedup, lambda: _pass_costs(scheduler)
        )
        self._progress(ModelState.READY, "")

    def _failed(self, message: str) -> None:
        self.error = message
        self._set_state(ModelState.FAILED, "")
        for flight in list(self._in_flight.values()):
            self._abandon(flight, message)
        self.running = self.waiting = 0
        if self.info is not None:
            self.crashed.set()

    def _deliver(self, now: float, result: StepResult) -> None:
        for output in result.outputs:
            if (flight := self._in_flight.get(output.request_id)) is None:
                continue  # it was abandoned
            try:
                self._deliver_output(flight, now, output)
            except Exception as error:
                self._metrics.failures.report("engine", error)
                self._abandon(flight, "the server failed to deliver the answer")
        if result.stats is not None:
            with self._metrics.failures.contained("engine"):
                self._metrics.observe_step(result.stats)
        self.running = result.running
        self.waiting = len(self._in_flight) - result.running
        # The scheduler has not counted the requests that arrived during its step.
        self._metrics.observe_step_result(replace(result, waiting=self.waiting))

    def _deliver_output(self, flight: _InFlight, now: float, output: Output) -> None:
        if output.pieces:
            with self._metrics.failures.contained("engine"):
                self._metrics.observe_generated(flight.request.client, len(output.pieces))
                if flight.first_output_at is not None:
                    passed = now - flight.last_output_at
                    self._metrics.observe_inter_token(passed, len(output.pieces))
            if flight.first_output_at is None:
                flight.first_output_at = now
            flight.last_output_at = now
        if output.finish:
            self._finish(flight, output)
        else:
            flight.handle.deliver(output)

    def _abandon(self, flight: _InFlight, message: str) -> None:
        """End a request with an error, of which the scheduler may still have something to say."""
        request_id = flight.request.request_id
        if request_id in self._in_flight:
            self._thread.cancel(request_id)
            self._finish(flight, Output(request_id, finish=FinishReason.ERROR, error=message))

    def _finish(self, flight: _InFlight, output: Output) -> None:
        """End a request: its place and its client come first, its figures may fail."""
        request, first = flight.request, flight.first_output_at
        del self._in_flight[request.request_id]
        reason = output.finish or FinishReason.ERROR
        with self._metrics.failures.contained("engine"):
            flight.handle.deliver(output)
        self.admission.leave(request.request_id, reason, output.stats)
        if not self._in_flight:
            self._idle.set()
            self._rest = asyncio.get_running_loop().call_later(_REST_SECONDS, give_back)
        latency = time.monotonic() - request.arrival
        ttft = None if first is None else first - request.arrival
        with self._metrics.failures.contained("engine"):
            self._metrics.observe_finish(request, reason, output.stats, latency, ttft)
        if request.trace is not None:
            with self._metrics.failures.contained("trace"):
                request.trace.finished(request, reason, output.stats)


def _pass_costs(scheduler: Scheduler) -> Iterator[tuple[str, int, float]]:
    """Kind, size and seconds of the passes of the target, then of the draft model."""
    yield from scheduler.cost_model.table()
    if scheduler.draft_cost_model is not None:
        yield from scheduler.draft_cost_model.table("draft_tokens")
