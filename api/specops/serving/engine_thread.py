"""Runs the engine on a thread of its own: commands go in, the results of its steps come out.

This thread alone touches the scheduler. What it has to say it says on the event loop, through the
three functions that it is given.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specops.engine.engine import LOAD_ERRORS, Engine
from specops.request import GenerationRequest, StepResult
from specops.system.priority import lower_priority

log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.02  # how long results that no client waits for are kept together
_JOIN_SECONDS = 10.0  # longer than any step, shorter than the patience of `docker stop`


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


class _Stop:
    """Ends every request, then the thread."""


_Command = GenerationRequest | _Cancel | _Stop


class EngineThread:
    """Loads an engine and steps it for as long as it has requests.

    Args:
        load: loads the engine, on the thread.
        loaded: told on the event loop that the engine is there.
        stepped: told on the event loop of each step, with the time at which it ended, in order.
        failed: told on the event loop why the thread has ended unasked.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        loaded: Callable[[Engine], None],
        stepped: Callable[[float, StepResult], None],
        failed: Callable[[str], None],
    ) -> None:
        self._load = load
        self._loaded, self._stepped, self._failed = loaded, stepped, failed
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._results: deque[tuple[float, StepResult]] = deque()  # with the time of each step
        self._woken = 0.0
        self._waking = False  # a callback that will look at the results is on its way
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """The thread has been started and has not ended."""
        return self._thread.is_alive()

    @property
    def native_id(self) -> int | None:
        """The kernel's number of the thread; None before it was started."""
        return self._thread.native_id

    # From the event loop.

    def start(self) -> None:
        """Start the thread; call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def add(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        """Have a request ended; does nothing for one that has ended."""
        self._inbox.put(_Cancel(request_id))

    async def stop(self) -> None:
        """End every request, then the thread; a load that is under way is left behind."""
        if self._loop is None:
            return
        self._inbox.put(_Stop())
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        if self._thread.is_alive():  # a load cannot be interrupted; the process's end ends it
            log.warning("the model is still loading: leaving without it")

    def on_loop(self, call: Callable[[], None]) -> None:
        """Have something called on the event loop, from any thread.

        Raises:
            RuntimeError: `start` was not called.
        """
        if self._loop is None:
            raise RuntimeError("start() was not called")
        self._loop.call_soon_threadsafe(call)

    def _deliver(self) -> None:
        self._waking = False  # before looking: a step that comes now wakes the loop again
        while self._results:
            self._stepped(*self._results.popleft())

    # On the thread.

    def _run(self) -> None:
        engine: Engine | None = None
        lower_priority()  # before the first pass: the threads that compute are started from here
        try:
            engine = self._load()
            self.on_loop(lambda: self._loaded(engine))
            self._serve(engine)
        except Exception as error:
            message = str(error) or repr(error)
            if engine is None and isinstance(error, LOAD_ERRORS):
                log.error("the model cannot be loaded", extra={"fields": {"reason": message}})
            else:
                log.exception("the engine ended", extra={"fields": _whereabouts(engine)})
            self.on_loop(lambda: self._failed(message))

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
        """Hand a step over. The loop is woken at once where a client waits, or else now and then.

        A wake-up costs 50 microseconds on the cores that compute, a step of a small model 350.
        """
        now = time.monotonic()
        self._results.append((now, result))
        urgent = any(output.urgent for output in result.outputs)
        if not self._waking and (urgent or now - self._woken >= _GATHER_SECONDS):
            self._waking, self._woken = True, now
            self.on_loop(self._deliver)


def _whereabouts(engine: Engine | None) -> dict[str, object]:
    """Whose requests the engine was at: the ids that their clients know."""
    if engine is None:
        return {}
    scheduler = engine.scheduler
    return {
        name: [sequence.request.client_id for sequence in sequences]
        for name, sequences in (("running", scheduler.running), ("waiting", scheduler.waiting))
    }
