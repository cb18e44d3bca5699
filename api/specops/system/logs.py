"""Writes log lines as JSON to stderr, each with its request's id and never with a prompt."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from specops.system.failures import SparseWarnings

# Libraries that warn about each bad connection or request.
_LIBRARIES = ("asyncio", "uvicorn.error")
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, request_id and the fields.

    Fields come from `log.info("...", extra={"fields": {...}})`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        current = request_id.get()
        if current is not None:
            line["request_id"] = current
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str) -> None:
    """Send every logger's lines to stderr as JSON, from `level` ("debug" to "error") up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in _LIBRARIES:
        logging.getLogger(name).filters = [SparseWarnings()]
