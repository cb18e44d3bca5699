"""The state that every endpoint gets: the application's, and its request's context."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.types import Receive, Scope

from specops.config import Settings
from specops.engine.engine import Engine
from specops.http.protocol import Protocol
from specops.http.recent_items import RecentItems
from specops.metrics.metrics import Metrics
from specops.serving.async_engine import AsyncEngine
from specops.serving.client_turns import ClientTurns
from specops.text.grammar import Matcher
from specops.tracing import RequestTrace

_KEY = "specops.context"  # of the request's scope


class Executors:
    """The threads besides the event loop's and the engine's, one for each kind of work.

    Attributes:
        compiling: compiles grammars, which does not hold Python's global lock, but takes a core.
        rendering: waits for the process that renders chat templates, which may take a second even
            for a short text.
        encoding: encodes texts, one at a time: the engine keeps its cores.
        encoding_long: the same for texts that take longer, up to seconds.
        inflating: decompresses bodies; the libraries do not hold Python's global lock.
        writing: writes long answers. Thousands of tokens, each with 20 alternatives, take a second.
    """

    def __init__(self) -> None:
        self.compiling, self.rendering = ClientTurns("compile"), ClientTurns("render")
        self.encoding, self.encoding_long = ClientTurns("encode"), ClientTurns("encode-long")
        self.inflating = ThreadPoolExecutor(1, "inflate")
        self.writing = ThreadPoolExecutor(1, "write")

    def shut_down(self) -> None:
        """End the threads after their current work.

        The application may be started again; a thread starts with its first work.
        """
        for turns in (self.compiling, self.rendering, self.encoding, self.encoding_long):
            turns.shut_down()
        for executor in (self.inflating, self.writing):
            executor.shutdown(wait=False, cancel_futures=True)
        self.__init__()  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class AppState:
    """The application's state. `create_app` makes it once.

    Attributes:
        settings: the settings.
        service: the engine on its thread.
        metrics: the metrics.
        items: items of recent answers of `/v1/responses`.
        executors: threads for work that would hold up the event loop.
        started: when the application was made, in seconds since 1970.
        aside: bytes of bodies that wait for threads without a place in the queue, by client.
    """

    settings: Settings
    service: AsyncEngine
    metrics: Metrics
    items: RecentItems = field(default_factory=RecentItems)
    executors: Executors = field(default_factory=Executors)
    started: int = field(default_factory=lambda: int(time.time()))
    aside: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True)
class Context:
    """One HTTP request, from its arrival to its log line. The middleware makes it.

    Attributes:
        app: the application's state.
        protocol: the endpoint's protocol.
        receive: the request's channel, which tells an endpoint that the client has left.
        request_id: the client's id, or a new one.
        arrival: when the request arrived, in seconds of `time.monotonic()`.
        client: name of the client's key; empty without keys.
        address: the client's address.
        trace: follows the request through the engine, if it is traced.
        body_bytes: size of the body.
        release: gives up the request's place in the queue; called at its end at the latest.
        matcher: keeps the grammar compiled while the request waits.
        served: name of the model that answers, for a header.
        ignored: names of the ignored parts of the body, for a header.
        read_text: returns a text of the body, which may be a mark for it (`LateTexts`).
        log_fields: returns the endpoint's fields of the log line.
    """

    app: AppState
    protocol: Protocol
    receive: Receive
    request_id: str
    arrival: float
    client: str = ""
    address: str = ""
    trace: RequestTrace | None = None
    body_bytes: int = 0
    release: Callable[[], None] = lambda: None
    matcher: Matcher | None = None
    served: str = ""
    ignored: list[str] = field(default_factory=list)
    read_text: Callable[[str], str] = str
    log_fields: Callable[[], dict[str, Any]] = dict

    def enter(self, scope: Scope) -> None:
        """Make this the context of a request."""
        scope[_KEY] = self

    @staticmethod
    def of(scope: Scope) -> Context:
        """Return the context of a request."""
        context: Context = scope[_KEY]
        return context

    @property
    def whose(self) -> str:
        """The name under which work takes turns: the client's, or its address without keys."""
        return self.client or self.address

    @property
    def settings(self) -> Settings:
        """The application's settings."""
        return self.app.settings

    @property
    def engine(self) -> Engine:
        """The loaded model.

        Raises:
            NotReady: see `AsyncEngine.engine`.
        """
        return self.app.service.engine


async def _context(request: Request) -> Context:
    # FastAPI would run a function that is not async on a thread, for 0.2 ms per request.
    return Context.of(request.scope)


Ctx = Annotated[Context, Depends(_context)]
