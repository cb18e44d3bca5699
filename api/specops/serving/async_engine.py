"""Serves requests on the event loop, with the engine on a separate thread.

The event loop admits requests and puts commands into a queue; the thread carries them out and steps
the engine as long as it has requests. It hands each step back to the event loop, which gives every
request its new tokens and counts the step. Only the thread touches the scheduler.

To wake the event loop takes 50 microseconds of the cores that compute, a step of a small model 350.
So several such steps are handed over together.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from specops.config import Settings
from specops.engine.engine import Engine, UnknownToken
from specops.engine.loading import LOAD_ERRORS
from specops.engine.model_info import Download, ModelInfo, ModelState, Report
from specops.engine.scheduler import Scheduler
from specops.metrics.metrics import Metrics
from specops.request import (
    FinishReason,
    GenerationRequest,
    Output,
    PromptTooLong,
    Step,
    StepKind,
)
from specops.runtime.kernels import report_lost_pages
from specops.serving.admission import AdmissionController
from specops.serving.bell import Bell
from specops.serving.request_handle import RequestHandle
from specops.system.allocator import give_back
from specops.system.priority import lower_priority

IDLE_SECONDS = 15.0  # after this time without a request, free memory goes back to the system
JOIN_SECONDS = 10.0  # longer than most steps, shorter than the patience of `docker stop`
# How long the thread gathers short steps, with output that a client reads and without.
_GATHER_STREAM, _GATHER = 0.004, 0.02
_SHORT = (
    StepKind.DECODE,
    StepKind.VERIFY,
)  # a prompt's next piece may take longer than a client waits
_LABELS = (
    *("name", "quant", "parameters", "default_drafter", "context", "slots"),
    *("kv_dtype", "threads", "kernels"),
)
log = logging.getLogger(__name__)

T = TypeVar("T")
_Command = Callable[[Scheduler], None]


class NotReady(Exception):  # noqa: N818 - a state, not a fault
    """The model is not loaded yet, or no longer serves."""

    def __init__(self, state: ModelState, message: str) -> None:
        super().__init__(message)
        self.state = state
        self.message = message


class AsyncEngine:
    """Loads the model in the background, then serves requests step by step.

    Args:
        settings: see `Settings`.
        metrics: gets the figures of steps and requests.
        load: loads the engine; called on the engine's thread.

    Attributes:
        state: state of the model.
        detail: the engine's work in this state.
        error: why the state is failed.
        info: description of the model; None until it is ready.
        crashed: set if the engine has failed after the model was ready.
        running: number of requests that hold a slot, after the latest step.
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
        self._settings = settings
        self._metrics = metrics
        metrics.watch_waiting(lambda: self.waiting)
        self._load = load
        self._engine: Engine | None = None
        self._admission: AdmissionController | None = None
        self._in_flight: dict[str, tuple[GenerationRequest, RequestHandle]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._idle_timer: asyncio.TimerHandle | None = None  # runs since the last request ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell: Bell | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()  # None: end
        self._results: deque[Step] = deque()
        self._delivering = False  # the event loop has been woken and will take the results
        self._woken_at = 0.0

    # -- for the endpoints, on the event loop ------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the engine's thread works, has not begun to, or is being stopped."""
        return self._thread.is_alive() or self.state in (ModelState.STARTING, ModelState.DRAINING)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return max(0, len(self._in_flight) - self.running)

    @property
    def engine(self) -> Engine:
        """The loaded model, for parts that any thread may use: tokenizer, chat template, `encode`.

        Raises:
            NotReady: the model is loading, draining or failed.
        """
        if self.state is not ModelState.READY or self._engine is None:
            message = self.error or f"the model is not ready: {self.state.value} {self.detail}"
            raise NotReady(self.state, message.strip())
        return self._engine

    @property
    def admission(self) -> AdmissionController:
        """Admits requests.

        Raises:
            NotReady: no model is loaded.
        """
        if self._admission is None:
            raise NotReady(self.state, "no model is loaded")
        return self._admission

    def start(self) -> None:
        """Start the engine's thread, which loads the model."""
        self._loop = asyncio.get_running_loop()
        self._bell = Bell(self._loop, self._deliver_steps)
        self._set_state(ModelState.STARTING, "")
        report_lost_pages()
        self._thread.start()

    async def stop(self) -> None:
        """Refuse new requests, let the running ones finish in time, end the thread.

        Neither a load nor a long step can be interrupted: both end with the process.
        """
        if self.state not in (ModelState.FAILED, ModelState.DRAINING):
            self._set_state(ModelState.DRAINING, "finishing the running requests")
        try:
            await asyncio.wait_for(self._idle.wait(), self._settings.drain_timeout)
        except TimeoutError:
            log.warning("%d requests did not finish in time", len(self._in_flight))
        if self._loop is None:
            return
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
        if self._thread.is_alive():
            busy = "the model is still loading" if self._engine is None else "a step takes long"
            log.warning("%s: leaving without waiting for it", busy)
        elif self._bell is not None:
            self._deliver_steps()
            self._bell.close()
            self._bell = None

    def submit(self, *requests: GenerationRequest) -> RequestHandle:
        """Queue requests, all or none.

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
            requests,
            position,
            cancel=lambda: self._cancel(requests),
            end=lambda request_id: self._order(Scheduler.stop, request_id),
        )
        self._idle.clear()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for request in requests:
            self._in_flight[request.request_id] = request, handle
            if request.trace is not None:
                request.trace.submitted(request)
            self._order(Scheduler.add, request)
            with self._metrics.failures.report_errors("engine"):
                self._metrics.observe_admitted(request)
        return handle

    def _with_times(self, request: GenerationRequest) -> GenerationRequest:
        arrival = request.arrival or time.monotonic()
        deadline = min(request.deadline, arrival + self._settings.request_timeout)
        return replace(request, arrival=arrival, deadline=deadline)

    def _cancel(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.request_id in self._in_flight:
                self._order(Scheduler.cancel, request.request_id)

    def _order(self, method: Callable[[Scheduler, T], None], argument: T) -> None:
        """Have the engine's thread call a method of the scheduler before its next step."""
        self._commands.put(lambda scheduler: method(scheduler, argument))

    # -- the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        engine: Engine | None = None
        lower_priority()  # before the first pass, which starts the compute threads
        try:
            engine = self._load(self._settings, self._report)
            self._on_loop(lambda: self._loaded(engine))
            engine.prepare()  # before the first step: later, streams would pause for it
            self._serve(engine.scheduler)
        except Exception as error:
            message = str(error) or repr(error)
            if engine is None and isinstance(error, LOAD_ERRORS):
                log.error("the model cannot be loaded", extra={"fields": {"reason": message}})
            else:
                log.exception("the engine ended", extra={"fields": _requests_of(engine)})
            self._on_loop(lambda: self._failed(message))

    def _serve(self, scheduler: Scheduler) -> None:
        while True:
            if scheduler.busy and self._commands.empty():
                self._publish(scheduler.step())
                continue
            self._wake()  # the next step may be longer
            command = self._commands.get()  # without work for the scheduler, the thread sleeps here
            if command is None:
                scheduler.cancel_all()
                self._publish(scheduler.step())
                self._wake()
                return
            command(scheduler)

    def _publish(self, step: Step) -> None:
        """Hand a step to the event loop: at once, or together with the next ones if it is short."""
        self._results.append(step)
        gathered = time.monotonic() - self._woken_at
        ends = step.kind not in _SHORT or any(output.finish for output in step.outputs)
        if gathered >= _GATHER or (step.outputs and (ends or gathered >= _GATHER_STREAM)):
            self._wake()

    def _wake(self) -> None:
        """Have the event loop take the gathered outputs."""
        if self._results and not self._delivering and self._bell is not None:
            self._delivering, self._woken_at = True, time.monotonic()
            self._bell.ring()

    def _report(self, state: ModelState, detail: str, download: Download | None = None) -> None:
        self._on_loop(lambda: self._progress(state, detail, download))

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is None:
            raise RuntimeError("start() was not called")
        if not self._loop.is_closed():  # else the process ends, and nobody waits for a report
            self._loop.call_soon_threadsafe(call)

    # -- the thread's reports, on the event loop ---------------------------------------------------

    def _set_state(self, state: ModelState, detail: str) -> None:
        self.state, self.detail = state, detail
        self._metrics.set_state(state.value)
        log.info("model is %s%s", state.value, f": {detail}" if detail else "")

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
        states = {"slots": info.state_bytes, "limit": info.snapshot_bytes}
        self._metrics.set_model(labels, info.slots, info.kv_tokens, states)
        self._metrics.watch_cache(scheduler.target.cache)
        if info.head_agreement is not None:
            self._metrics.set_draft_head_agreement(info.head_agreement)
        self._admission = AdmissionController(
            info.slots, self._settings.queue_size, info.kv_tokens, self._metrics.observe_rejected
        )
        controller = scheduler.controller
        self._metrics.watch_controller(
            lambda: controller.estimated_speedup, lambda: _pass_costs(scheduler)
        )
        self._progress(ModelState.READY, "")

    def _failed(self, message: str) -> None:
        self.error = message
        self._set_state(ModelState.FAILED, "")
        self._deliver_steps()
        for request, handle in list(self._in_flight.values()):
            self._abandon(request, handle, message)
        self.running = 0
        if self.info is not None:
            self.crashed.set()

    def _deliver_steps(self) -> None:
        self._delivering = False  # before the results are taken: the next step wakes the loop again
        while self._results:
            step = self._results.popleft()
            with self._metrics.failures.report_errors("engine"):
                for output in step.outputs:
                    if flight := self._in_flight.get(output.request_id):  # else it was abandoned
                        self._deliver(*flight, output)
                self.running = step.running
                self._metrics.observe_step(step)

    def _deliver(self, request: GenerationRequest, handle: RequestHandle, output: Output) -> None:
        try:
            if output.finish:
                self._finish(request, handle, output)
            else:
                handle.deliver(output)
        except Exception as error:
            self._metrics.failures.report("engine", error)
            self._abandon(request, handle, "the server failed to deliver the answer")

    def _abandon(self, request: GenerationRequest, handle: RequestHandle, message: str) -> None:
        """End a request with an error; the scheduler may still report on it."""
        if request.request_id in self._in_flight:
            self._cancel([request])
            last = Output(request.request_id, finish=FinishReason.ERROR, error=message)
            self._finish(request, handle, last)

    def _finish(self, request: GenerationRequest, handle: RequestHandle, output: Output) -> None:
        """End a request: the client and the next request come first, the figures may fail."""
        del self._in_flight[request.request_id]
        reason = output.finish or FinishReason.ERROR
        with self._metrics.failures.report_errors("engine"):
            handle.deliver(output)
        self.admission.leave(request, reason, output.stats)
        if not self._in_flight:
            self._idle.set()
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, give_back)
        latency = time.monotonic() - request.arrival
        with self._metrics.failures.report_errors("engine"):
            self._metrics.observe_finish(request, reason, output.stats, latency)
        if request.trace is not None:
            with self._metrics.failures.report_errors("trace"):
                request.trace.finished(request, reason, output.stats)


def _requests_of(engine: Engine | None) -> dict[str, object]:
    """Ids of the engine's requests, as their clients know them."""
    if engine is None:
        return {}
    scheduler = engine.scheduler
    return {
        name: [sequence.request.client_id for sequence in sequences]
        for name, sequences in (("running", scheduler.running), ("waiting", scheduler.waiting))
    }


def _pass_costs(scheduler: Scheduler) -> Iterator[tuple[str, int, float]]:
    """Kind, size and seconds of the passes of the target, then of the draft model."""
    yield from scheduler.cost_model.table()
    if scheduler.draft_cost_model is not None:
        yield from scheduler.draft_cost_model.table("draft_tokens")
