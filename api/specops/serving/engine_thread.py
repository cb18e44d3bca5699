"""Runs the engine on a thread of its own: commands go in, the results of its steps come out.

Only this thread touches the scheduler. It reports on the event loop, through three functions.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from specops.engine.engine import Engine
from specops.engine.loading import LOAD_ERRORS
from specops.engine.scheduler import Scheduler
from specops.request import GenerationRequest, StepResult
from specops.system.failures import Failures
from specops.system.priority import lower_priority

log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.02  # how long the thread collects results that no client waits for
_JOIN_SECONDS = 10.0  # longer than any step, shorter than the patience of `docker stop`


class EngineThread:
    """Loads an engine, and steps it as long as it has requests.

    Args:
        load: loads the engine; called on the thread.
        loaded: called on the event loop when the engine is loaded.
        stepped: called on the event loop for each step in order, with the time of its end.
        failed: called on the event loop with the reason when the thread has failed.
        failures: counts calls on the event loop that have failed.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        loaded: Callable[[Engine], None],
        stepped: Callable[[float, StepResult], None],
        failed: Callable[[str], None],
        failures: Failures,
    ) -> None:
        self._load = load
        self._loaded, self._stepped, self._failed = loaded, stepped, failed
        self._failures = failures
        self._serving = False  # the engine is loaded
        # Commands, called with the scheduler on the thread; None ends the thread.
        self._inbox: queue.SimpleQueue[Callable[[Scheduler], None] | None] = queue.SimpleQueue()
        self._results: deque[tuple[float, StepResult]] = deque()  # with the time of each step
        self._woken = 0.0
        self._waking = False  # the event loop has been woken and will take the results
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread.is_alive()

    # -- called on the event loop ------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def add(self, request: GenerationRequest) -> None:
        """Give a request to the scheduler."""
        self._inbox.put(lambda scheduler: scheduler.add(request))

    def cancel(self, request_id: str) -> None:
        """Cancel a request; does nothing for a request that has ended."""
        self._inbox.put(lambda scheduler: scheduler.cancel(request_id))

    def stop_answer(self, request_id: str) -> None:
        """End an answer that is whole; does nothing for a request that has ended."""
        self._inbox.put(lambda scheduler: scheduler.stop(request_id))

    async def stop(self) -> None:
        """End every request, then the thread. Neither a load nor a long step is waited for."""
        if self._loop is None:
            return
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)
        if self._thread.is_alive():  # neither can be interrupted; both end with the process
            busy = "a step takes long" if self._serving else "the model is still loading"
            log.warning("%s: leaving without waiting for it", busy)

    def on_loop(self, call: Callable[[], None]) -> None:
        """Call a function on the event loop; usable from any thread after `start`."""
        if self._loop is None:
            raise RuntimeError("start() was not called")
        if not self._loop.is_closed():  # else the process ends, and nobody waits for a report
            self._loop.call_soon_threadsafe(call)

    def _deliver(self) -> None:
        self._waking = False  # before the results are taken: the next step wakes the loop again
        while self._results:
            with self._failures.contained("engine"):
                self._stepped(*self._results.popleft())

    # -- called on the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        engine: Engine | None = None
        lower_priority()  # before the first pass, which starts the compute threads
        try:
            engine = self._load()
            self._serving = True
            self.on_loop(lambda: self._loaded(engine))
            self._serve(engine.scheduler)
        except Exception as error:
            message = str(error) or repr(error)
            if engine is None and isinstance(error, LOAD_ERRORS):
                log.error("the model cannot be loaded", extra={"fields": {"reason": message}})
            else:
                log.exception("the engine ended", extra={"fields": _requests_of(engine)})
            self.on_loop(lambda: self._failed(message))

    def _serve(self, scheduler: Scheduler) -> None:
        while True:
            try:
                # Without work for the scheduler, the thread sleeps until a command comes.
                command = self._inbox.get(block=not scheduler.busy)
            except queue.Empty:
                self._publish(scheduler.step())
                continue
            if command is None:
                scheduler.cancel_all()
                self._publish(scheduler.step())
                return
            command(scheduler)

    def _publish(self, result: StepResult) -> None:
        """Hand a step to the event loop. Wake the loop at once if a client waits, else rarely.

        A wake-up takes 50 microseconds of the cores that compute; a step of a small model 350.
        """
        now = time.monotonic()
        self._results.append((now, result))
        urgent = any(output.urgent for output in result.outputs)
        if not self._waking and (urgent or now - self._woken >= _GATHER_SECONDS):
            self._waking, self._woken = True, now
            self.on_loop(self._deliver)


def _requests_of(engine: Engine | None) -> dict[str, object]:
    """Ids of the engine's requests, as their clients know them."""
    if engine is None:
        return {}
    scheduler = engine.scheduler
    return {
        name: [sequence.request.client_id for sequence in sequences]
        for name, sequences in (("running", scheduler.running), ("waiting", scheduler.waiting))
    }
