"""Contains the failures of callbacks: an exception in one ends its work, and nothing else.

The event loop, uvicorn's ticks and Prometheus' collectors call our functions for one connection,
request or page of metrics. Each failure is counted, and logged once a minute per kind, so that a
client that provokes failures cannot fill the disk with tracebacks.
"""

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

_SECONDS = 60.0
_MAX_KINDS = 256  # remembered at a time, so that a client that invents kinds cannot fill memory
log = logging.getLogger(__name__)


class OncePerMinute:
    """Chooses which of many similar log lines to write: the first of each kind in a minute.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[Hashable, tuple[float, int]] = {}  # when it was written, how many since

    def skipped(self, kind: Hashable) -> int | None:
        """Return how many lines of this kind were skipped before this one; None: skip it."""
        now = self._clock()
        since, count = self._kinds.get(kind, (-math.inf, 0))
        if now - since < _SECONDS:
            self._kinds[kind] = since, count + 1
            return None
        if kind not in self._kinds and len(self._kinds) == _MAX_KINDS:
            old = [key for key, (then, _) in self._kinds.items() if now - then >= _SECONDS]
            if not old:
                return None
            for key in old:
                del self._kinds[key]
        self._kinds[kind] = now, 0
        return count


class SparseWarnings(logging.Filter):
    """Passes a library's warnings and errors once a minute for each message and exception."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = OncePerMinute()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the record."""
        if record.levelno < logging.WARNING:
            return True
        kind = (record.msg, record.exc_info[0] if record.exc_info else None)
        skipped = self._lines.skipped(kind)
        if skipped:
            record.fields = {**getattr(record, "fields", {}), "left_out": skipped}
        return skipped is not None


class Failures:
    """Counts and logs the exceptions of callbacks.

    Args:
        count: called for each failure with one of `metrics.series.CALLBACKS`.
        clock: returns seconds.
    """

    def __init__(
        self, count: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count = count
        self._lines = OncePerMinute(clock)

    def report(self, where: str, error: BaseException, what: str = "a callback failed") -> None:
        """Count a failure; log the first of its kind in a minute, with its traceback.

        Args:
            where: the part of the service, for the metric.
            error: the exception.
            what: the log message.
        """
        self._count(where)
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        line = (traceback.tb_frame.f_code, traceback.tb_lineno) if traceback else what
        skipped = self._lines.skipped((where, type(error), line))
        if skipped is not None:
            fields = {"where": where, "left_out": skipped}
            log.error(what, exc_info=error, extra={"fields": fields})

    @contextmanager
    def report_errors(self, where: str) -> Iterator[None]:
        """Report an exception of the block, and continue after it."""
        try:
            yield
        except Exception as error:
            self.report(where, error)
