"""The engine on its thread, and the way to it and back.

HTTP handlers live on the event loop; the engine's thread alone touches rows and requests in
flight. Between them: an inbox of commands, and one callback per step onto the loop, which hands
every request its new tokens and turns the step's numbers into metrics.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specops.admission import MemoryGate
from specops.config import Settings
from specops.door import Door
from specops.engine import Download, Engine, ModelInfo, ModelState, Report
from specops.metrics import Metrics
from specops.places import Places
from specops.priority import give_way
from specops.request import FinishReason, GenerationRequest, Output, PromptTooLong, StepResult
from specops.ticket import InFlight, Ticket

log = logging.getLogger(__name__)

__all__ = [
    "ModelInfo",
    "ModelState",
    "NotReady",
    "PromptTooLong",
    "Service",
    "Ticket",
]


class NotReady(Exception):  # noqa: N818 - a state, not a fault
    """The model is not loaded yet, or not any more."""

    def __init__(self, state: ModelState, message: str) -> None:
        super().__init__(message)
        self.state = state
        self.message = message


_GATHER_SECONDS = 0.02  # how long steps that nobody waits for are kept together
_JOIN_SECONDS = 10.0  # longer than any step, shorter than the patience of `docker stop`


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


class _Stop:
    """Ends every request, then the thread."""


_Command = GenerationRequest | _Cancel | _Stop


class Service:
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
        self._load = load
        self._engine: Engine | None = None
        self._door: Door | None = None
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._results: deque[tuple[float, StepResult]] = deque()  # with the time of each step
        self._woken = 0.0
        self._waking = False  # a callback that will look at the results is on its way
        self._in_flight: dict[str, InFlight] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """The engine's thread works, or was told to end."""
        return self._thread.is_alive() or self.state in (ModelState.STARTING, ModelState.DRAINING)

    def start(self) -> None:
        """Start the engine's thread; call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._set_state(ModelState.STARTING, "")
        self._thread.start()

    async def stop(self) -> None:
        """Refuse new requests, let the running ones finish in time, end the thread."""
        if self.state not in (ModelState.FAILED, ModelState.DRAINING):
            self._set_state(ModelState.DRAINING, "finishing the running requests")
        if self._loop is None:
            return
        try:
            await asyncio.wait_for(self._idle.wait(), self._settings.drain_timeout)
        except TimeoutError:
            log.warning("%d requests did not finish in time", len(self._in_flight))
        self._inbox.put(_Stop())
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        if self._thread.is_alive():  # a load cannot be interrupted; the process's end ends it
            log.warning("the model is still loading: leaving without it")

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
    def door(self) -> Door:
        """Who is let in; for the event loop alone.

        Raises:
            NotReady: no model is loaded.
        """
        if self._door is None:
            raise NotReady(self.state, "no model is loaded")
        return self._door

    def submit(self, *requests: GenerationRequest) -> Ticket:
        """Queue requests, all or none; call on the event loop.

        Raises:
            NotReady: the model is loading, draining or failed.
            PromptTooLong: a prompt leaves no room for an answer.
            QueueFull: see `Door.check`.
        """
        engine = self.engine
        try:
            requests = tuple(self._with_times(engine.admit(request)) for request in requests)
        except PromptTooLong:
            self._metrics.observe_rejected("prompt_too_long")
            raise
        if taken := [item for item in requests if item.request_id in self._in_flight]:
            raise ValueError(f"request {taken[0].request_id} is already running")
        place = self.door.enter(requests)
        ticket = Ticket(requests, place, lambda: self._cancel(requests))
        self._idle.clear()
        for request in requests:
            self._in_flight[request.request_id] = InFlight(request, ticket)
            self.waiting += 1  # until the next step tells
            self._inbox.put(request)
        return ticket

    def _cancel(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.request_id in self._in_flight:
                self._inbox.put(_Cancel(request.request_id))

    def _with_times(self, request: GenerationRequest) -> GenerationRequest:
        arrival = request.arrival or time.monotonic()
        return replace(
            request,
            arrival=arrival,
            deadline=min(request.deadline, arrival + self._settings.request_timeout),
            start_by=min(request.start_by, arrival + self._settings.queue_timeout),
        )

    def _set_state(self, state: ModelState, detail: str) -> None:
        self.state, self.detail = state, detail
        self._metrics.set_state(state.value)
        log.info("model is %s %s", state.value, detail)

    # On the engine's thread.

    def _run(self) -> None:
        engine: Engine | None = None
        give_way()  # before the first pass: the threads that compute are started from here
        try:
            engine = self._load(self._settings, self._on_loop_report)
            self._on_loop(lambda: self._loaded(engine))
            self._serve(engine)
        except Exception as error:
            log.exception("the engine ended", extra={"fields": _whereabouts(engine)})
            message = str(error) or repr(error)
            self._on_loop(lambda: self._failed(message))

    def _serve(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        while True:
            try:
                # Nothing to compute: sleep until a command comes.
                command = self._inbox.get(block=not scheduler.busy)
                match command:
                    case GenerationRequest():
                        scheduler.add(command)
                    case _Cancel(request_id):
                        scheduler.cancel(request_id)
                    case _Stop():
                        scheduler.cancel_all()
                        self._publish(scheduler.step())
                        return
            except queue.Empty:
                self._publish(scheduler.step())

    def _publish(self, result: StepResult) -> None:
        """Hand a step over. The loop is woken at once where somebody waits, or else now and then.

        A wake-up costs 50 microseconds on the cores that compute, a step of a small model 350.
        """
        now = time.monotonic()
        self._results.append((now, result))
        urgent = any(output.urgent for output in result.outputs)
        if not self._waking and (urgent or now - self._woken >= _GATHER_SECONDS):
            self._waking, self._woken = True, now
            self._on_loop(self._deliver_all)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is None:
            raise RuntimeError("start() was not called")
        self._loop.call_soon_threadsafe(call)

    def _on_loop_report(
        self, state: ModelState, detail: str, download: Download | None = None
    ) -> None:
        self._on_loop(lambda: self._progress(state, detail, download))

    # On the event loop.

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
        self._metrics.set_model(_labels(engine.info))
        self._metrics.set_rows(engine.info.rows)
        self._metrics.set_kv_capacity(engine.info.kv_capacity_tokens)
        prompt_token, output_token = engine.token_seconds()
        places = Places(
            rows=engine.info.rows,
            queue_size=self._settings.queue_size,
            prompt_token_seconds=prompt_token,
            output_token_seconds=output_token,
        )
        gate = MemoryGate(engine.info.kv_capacity_tokens, engine.info.rows)
        self._door = Door(places, gate, self._metrics.observe_rejected)
        controller = engine.scheduler.controller
        self._metrics.watch_controller(lambda: controller.estimated_speedup, controller.costs.table)
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

    def _deliver_all(self) -> None:
        self._waking = False  # before looking: a step that comes now wakes the loop again
        while self._results:
            self._deliver(*self._results.popleft())

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
                flight.ticket.deliver(output)
        for step in result.stats:
            self._metrics.observe_step(step)
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
        self.door.leave(request.request_id, reason, output.stats)
        if not self._in_flight:
            self._idle.set()
        flight.ticket.deliver(output)


def _whereabouts(engine: Engine | None) -> dict[str, object]:
    """Whose requests the engine was at: the ids that their clients know."""
    if engine is None:
        return {}
    scheduler = engine.scheduler
    return {
        name: [sequence.request.request_id.partition("/")[0] for sequence in sequences]
        for name, sequences in (("running", scheduler.running), ("waiting", scheduler.waiting))
    }


def _labels(info: ModelInfo) -> dict[str, str]:
    return {
        "name": info.name,
        "quant": info.quant,
        "parameters": str(info.parameters),
        "draft_parameters": str(info.draft_parameters or 0),
        "drafters": ",".join(info.drafters),
        "default_drafter": info.default_drafter,
        "context": str(info.context),
        "rows": str(info.rows),
        "threads": str(info.threads),
        "kernels": info.kernels,
    }
