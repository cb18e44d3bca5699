"""The engine on its thread, and the door to it.

HTTP handlers live on the event loop; the engine's thread alone touches rows and requests in
flight. Between them: an inbox of commands, and one callback per step onto the loop, which hands
every request its new tokens and turns the step's numbers into metrics.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from specops.admission import MemoryGate, Shed
from specops.config import Settings
from specops.engine import Download, Engine, ModelInfo, ModelState, Report
from specops.metrics import Metrics
from specops.request import FinishReason, GenerationRequest, Output, PromptTooLong, StepResult

log = logging.getLogger(__name__)

__all__ = [
    "ModelInfo",
    "ModelState",
    "NotReady",
    "PromptTooLong",
    "QueueFull",
    "Service",
    "Ticket",
]

_SMOOTHING = 0.1  # weight of the newest request in the mean time that one takes


class NotReady(Exception):  # noqa: N818 - a state, not a fault
    """The model is not loaded yet, or not any more."""

    def __init__(self, state: ModelState, message: str) -> None:
        super().__init__(message)
        self.state = state
        self.message = message


_FULL = {
    None: "the queue is full",
    Shed.KV_TOKENS: "the requests before this one will fill the KV cache many times over",
    Shed.MEMORY: "memory is running out",
    Shed.PRESSURE: "the machine waits for memory most of the time",
}


class QueueFull(Exception):  # noqa: N818 - a state, not a fault
    """All places are taken, or memory is. `retry_after` is the expected wait, in seconds."""

    def __init__(self, retry_after: int, shed: Shed | None = None) -> None:
        super().__init__(f"{_FULL[shed]}; try again in {retry_after} s")
        self.retry_after = retry_after
        self.reason = "queue_full" if shed is None else shed.value


_GATHER_SECONDS = 0.02  # how long steps that nobody waits for are kept together
_JOIN_SECONDS = 10.0  # longer than any step, shorter than the patience of `docker stop`
_REASONS: dict[type[Exception], str] = {
    NotReady: "not_ready",
    PromptTooLong: "prompt_too_long",
}


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


class _Stop:
    """Ends every request, then the thread."""


_Command = GenerationRequest | _Cancel | _Stop


class Ticket:
    """A request's place. Iterate over it for its outputs; the last has `finish` set."""

    def __init__(self, request: GenerationRequest, cancel: Callable[[], None]) -> None:
        self.request_id = request.request_id
        self.request = request
        self.first_output_at: float | None = None
        self.last_output_at = 0.0
        self._cancel = cancel
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    def cancel(self) -> None:
        """Give the place up; does nothing where the request has ended."""
        self._cancel()

    def deliver(self, output: Output) -> None:
        """Hand an output to whoever iterates."""
        self._outputs.put_nowait(output)

    async def __aiter__(self) -> AsyncIterator[Output]:
        while True:
            output = await self._outputs.get()
            yield output
            if output.finish:
                return


class Service:
    """Loads the model in the background, then serves requests one step after another.

    Attributes:
        state: how far the model is.
        detail: what is being done.
        error: why the state is failed.
        info: the model, once it is ready.
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
        self.running = 0
        self.waiting = 0
        self._settings = settings
        self._metrics = metrics
        self._load = load
        self._engine: Engine | None = None
        self._gate: MemoryGate | None = None
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._results: deque[tuple[float, StepResult]] = deque()  # with the time of each step
        self._woken = 0.0
        self._waking = False  # a callback that will look at the results is on its way
        self._tickets: dict[str, Ticket] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._request_seconds = 1.0  # mean time of a request in a row

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
            log.warning("%d requests did not finish in time", len(self._tickets))
        self._inbox.put(_Stop())
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        if self._thread.is_alive():  # a load cannot be interrupted; the process's end ends it
            log.warning("the model is still loading: leaving without it")

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt; callable from any thread.

        Raises:
            NotReady: no model is loaded.
        """
        return self._ready().encode(text)

    def submit(self, request: GenerationRequest) -> Ticket:
        """Queue a request; call on the event loop.

        Raises:
            NotReady: the model is loading, draining or failed.
            PromptTooLong: the prompt leaves no room for an answer.
            QueueFull: every row and every place in the queue is taken, or memory is.
        """
        try:
            engine = self._ready()
            request = self._with_times(engine.admit(request))
            self._check_room(engine.info, request)
        except QueueFull as error:
            self._metrics.observe_rejected(error.reason)
            raise
        except (NotReady, PromptTooLong) as error:
            self._metrics.observe_rejected(_REASONS[type(error)])
            raise
        if request.request_id in self._tickets:
            raise ValueError(f"request {request.request_id} is already running")
        ticket = Ticket(request, lambda: self._inbox.put(_Cancel(request.request_id)))
        self._tickets[request.request_id] = ticket
        self._idle.clear()
        self.waiting += 1  # until the next step tells
        self._inbox.put(request)
        return ticket

    def _ready(self) -> Engine:
        if self.state is not ModelState.READY or self._engine is None:
            message = self.error or f"the model is not ready: {self.state.value} {self.detail}"
            raise NotReady(self.state, message.strip())
        return self._engine

    def _check_room(self, info: ModelInfo, request: GenerationRequest) -> None:
        """Raise `QueueFull` where there is no place for the request."""
        if len(self._tickets) >= info.rows + self._settings.queue_size:
            raise QueueFull(self._retry_after())
        if self._gate is not None:
            shed = self._gate.refusal(
                promised_tokens=sum(ticket.request.tokens for ticket in self._tickets.values()),
                tokens=request.tokens,
                in_flight=len(self._tickets),
            )
            if shed is not None:
                raise QueueFull(self._retry_after(), shed)

    def _with_times(self, request: GenerationRequest) -> GenerationRequest:
        arrival = request.arrival or time.monotonic()
        deadline = min(request.deadline, arrival + self._settings.request_timeout)
        return replace(request, arrival=arrival, deadline=deadline)

    def _retry_after(self) -> int:
        rounds = len(self._tickets) / (self.info.rows if self.info else 1)
        return max(1, math.ceil(self._request_seconds * rounds / 2))

    def _set_state(self, state: ModelState, detail: str) -> None:
        self.state, self.detail = state, detail
        self._metrics.set_state(state.value)
        log.info("model is %s %s", state.value, detail)

    # On the engine's thread.

    def _run(self) -> None:
        try:
            engine = self._load(self._settings, self._on_loop_report)
            self._on_loop(lambda: self._loaded(engine))
            self._serve(engine)
        except Exception as error:
            log.exception("the engine ended")
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
        self._gate = MemoryGate(engine.info.kv_capacity_tokens, engine.info.rows)
        self._metrics.set_model(_labels(engine.info))
        self._metrics.set_kv_capacity(engine.info.kv_capacity_tokens)
        self._progress(ModelState.READY, "")

    def _failed(self, message: str) -> None:
        self.error = message
        self._set_state(ModelState.FAILED, "")
        for ticket in list(self._tickets.values()):
            output = Output(ticket.request_id, finish=FinishReason.ERROR, error=message)
            self._finish(ticket, output)
        self.running = self.waiting = 0

    def _deliver_all(self) -> None:
        self._waking = False  # before looking: a step that comes now wakes the loop again
        while self._results:
            self._deliver(*self._results.popleft())

    def _deliver(self, now: float, result: StepResult) -> None:
        for output in result.outputs:
            ticket = self._tickets[output.request_id]
            if output.pieces:
                if ticket.first_output_at is None:
                    ticket.first_output_at = now
                else:
                    passed = now - ticket.last_output_at
                    self._metrics.observe_inter_token(passed, len(output.pieces))
                ticket.last_output_at = now
            if output.finish:
                self._finish(ticket, output)
            else:
                ticket.deliver(output)
        for step in result.stats:
            self._metrics.observe_step(step)
        self.running = result.running
        self.waiting = len(self._tickets) - result.running
        # The scheduler does not see what came in during its step.
        self._metrics.observe_step_result(replace(result, waiting=self.waiting))

    def _finish(self, ticket: Ticket, output: Output) -> None:
        del self._tickets[ticket.request_id]
        arrival, first = ticket.request.arrival, ticket.first_output_at
        latency = time.monotonic() - arrival
        ttft = None if first is None else first - arrival
        reason = output.finish or FinishReason.ERROR
        self._metrics.observe_finish(reason, output.stats, latency, ttft)
        if output.stats is not None:
            self._metrics.observe_queue_wait(output.stats.queue_seconds)
            seconds = latency - output.stats.queue_seconds
            self._request_seconds += _SMOOTHING * (seconds - self._request_seconds)
        if not self._tickets:
            self._idle.set()
        ticket.deliver(output)


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
    }
