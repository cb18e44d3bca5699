"""Gives every HTTP request an id, a check of its key, a limit of its body, a log line, and an
answer to any failure.

The middleware reads the whole body before the application sees the request: half a request takes
no slot. It is pure ASGI, because the framework's base class for middleware hides that a client
left, and times streams wrongly.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specops.http.errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    internal_error,
    queue_full,
    unavailable,
)
from specops.http.protocol import Protocol
from specops.http.protocols import PROTOCOLS
from specops.http.security.hosts import Hosts
from specops.http.security.keys import ApiKeys
from specops.http.security.request_body import (
    LARGE_BODY_BYTES,
    MAX_BATCH_BYTES,
    MAX_BODY_BYTES,
    body_encoding,
    decompressed,
    refuse_complex,
)
from specops.http.state import AppState, Context
from specops.metrics.series import OTHER
from specops.serving.admission import QueueFull
from specops.synonyms import PATHS
from specops.system import logs
from specops.system.failures import OncePerMinute
from specops.tracing import RequestTrace

# Every memory plan leaves room for this many, of 1 MiB each.
MAX_LARGE_BODIES = 36
_ABSOLUTE = re.compile(rb"https?://([^/]+)(/.*)?", re.IGNORECASE | re.DOTALL)
# A larger body, of texts to embed, counts as this many until it is answered: bytes and tokens.
_BATCH = 16
_VALID_ID = re.compile(r"[\x21-\x7e]{1,64}")
_YIELDS = 3  # turns of the event loop, after which it has seen all simultaneous requests
_REFUSALS = (401, 403, 413, 429, 503)
_QUIET_PATHS = ("/health", "/metrics")  # other programs request them every few seconds
# The reasons of rejections in the metrics, by the answers' codes.
_REASONS = {
    "invalid_api_key": "unauthorized",
    "host_not_allowed": "unknown_host",
    "invalid_host": "invalid",
    "body_too_large": "too_large",
    "unsupported_encoding": "invalid",
    "invalid_encoding": "invalid",
}
log = logging.getLogger(__name__)


class Endpoints:
    """Names the endpoint of a path: metrics have a label value per route, not per path.

    Args:
        routes: the application's routes.

    Attributes:
        paths: the endpoints' paths, with their parameters: `/v1/models/{model}`.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        by_path = {route.path_format: route for route in routes if isinstance(route, Route)}
        self.paths = tuple(by_path)
        self._fixed = {path for path, route in by_path.items() if not route.param_convertors}
        self._patterns = [
            (route.path_regex, path) for path, route in by_path.items() if route.param_convertors
        ]

    def of(self, path: str) -> str:
        """Return the endpoint of a request's path, or `OTHER`."""
        if path in self._fixed:
            return path
        return next((name for regex, name in self._patterns if regex.match(path)), OTHER)


@dataclass(eq=False)
class RequestContext:
    """Wraps the application.

    Each request gets a `Context`. Its id is the client's `X-Request-ID` if that is short and
    printable, otherwise a new one; it is also in the response's headers (Anthropic's clients read
    `request-id`) and in every log line.

    Args:
        app: the application.
        state: the application's state.
        keys: the keys that clients must send.
        hosts: the names under which the service answers.
        endpoints: names the endpoint of a path, for the metrics.
        admit: raises QueueFull to refuse a request. It is called before the body is read, and
            again with True once the body is complete: then it may set the context's `release`.
            Refusing a crowd is ten times as fast without parsing its bodies.
        trace: returns the trace of a request with this arrival time, or None.
    """

    app: ASGIApp
    _: KW_ONLY
    state: AppState
    keys: ApiKeys
    hosts: Hosts
    endpoints: Endpoints
    admit: Callable[[Scope, bool], None]
    trace: Callable[[Scope, float], RequestTrace | None]

    def __post_init__(self) -> None:
        self._large_bodies = 0  # MiB of large bodies being read, and of batches in progress
        self._lines = OncePerMinute()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        protocol = _addressed(scope)
        headers = Headers(scope=scope)
        sent = headers.get("x-request-id", "")
        request_id = sent if _VALID_ID.fullmatch(sent) else uuid.uuid4().hex
        ids = dict.fromkeys(protocol.id_headers, request_id)
        most = _most_bytes(scope["path"])
        exchange = _Exchange(receive, send, ids, _length(headers), most)
        context = Context(
            app=self.state,
            protocol=protocol,
            receive=exchange.receive,
            request_id=request_id,
            arrival=exchange.started,
            client=self.keys.client(headers),
            address=str((scope.get("client") or ("",))[0]),
            trace=self.trace(scope, exchange.started),
        )
        context.enter(scope)
        token = logs.request_id.set(request_id)
        try:
            await self._answer(scope, exchange)
        finally:
            self._large_bodies -= exchange.batch
            context.release()
            endpoint = self.endpoints.of(scope["path"])
            self.state.metrics.observe_http(endpoint, exchange.result)
            if context.trace is not None:
                with self.state.metrics.failures.report_errors("trace"):
                    context.trace.answered(exchange.result)
            self._log_access(scope, endpoint, exchange, context)
            logs.request_id.reset(token)

    def _log_access(
        self, scope: Scope, endpoint: str, exchange: _Exchange, context: Context
    ) -> None:
        """Log each answered request on one line.

        Refused and incomplete requests, and pages read without a key, get one line per minute and
        kind: otherwise a crowd or a stranger could push all other lines out of a log. The debug log
        has all.
        """
        fields: dict[str, Any] = {
            "method": scope["method"],
            "path": scope["path"],
            "status": exchange.result,
            "seconds": round(time.monotonic() - exchange.started, 4),
        }
        level = logging.DEBUG if scope["path"].startswith(_QUIET_PATHS) else logging.INFO
        stranger = bool(self.keys.clients) and not context.client
        if stranger or not exchange.dispatched or exchange.result in _REFUSALS:
            kind = (endpoint, exchange.result, context.client)
            skipped = self._lines.skipped(kind)
            if skipped is None:
                level = logging.DEBUG
            else:
                fields["left_out"] = skipped
        if context.trace is not None:
            fields["trace_id"] = context.trace.trace_id
        log.log(level, "request", extra={"fields": fields | context.log_fields()})

    async def _answer(self, scope: Scope, exchange: _Exchange) -> None:
        try:
            if (answer := await self._early_answer(scope, exchange)) is not None:
                await answer(scope, exchange.receive, exchange.send)
                return
            if exchange.client_left:
                return
            exchange.dispatched = True
            for _ in range(_YIELDS):  # of simultaneous requests, refusals go out first
                await asyncio.sleep(0)
            # HEAD gets GET's headers; the copied scope keeps the server from sending a body.
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(asked, exchange.receive, exchange.send)
        except Exception:
            log.exception("request failed")
            if exchange.status is not None:
                raise  # the response is incomplete: the server must cut the connection
            failed = Context.of(scope).protocol.error_response(internal_error())
            await failed(scope, exchange.receive, exchange.send)

    async def _early_answer(self, scope: Scope, exchange: _Exchange) -> Response | None:
        """Read the body of an accepted request, or return the refusal of another one."""
        try:
            headers = Headers(scope=scope)
            self.keys.check(scope["path"], headers)
            shape = headers.get("x-load-test")
            if shape and self.keys.known(headers):  # also on paths that need no key
                self.state.metrics.observe_load_test(shape)
            self.hosts.check(scope["path"], headers)
            self.admit(scope, False)
            encoding = body_encoding(headers.get("content-encoding"))
            await self._read(exchange)
            if encoding and exchange.body and not exchange.client_left:
                exchange.body = await decompressed(
                    exchange.body, encoding, exchange.most_bytes, self.state.executors.inflating
                )
            refuse_complex(exchange.body, exchange.most_bytes)
            if len(exchange.body) > MAX_BODY_BYTES:
                self._take_large(_BATCH)
                exchange.batch = _BATCH
            Context.of(scope).body_bytes = len(exchange.body)
            if not exchange.client_left:
                self.admit(scope, True)
        except QueueFull as error:  # counted by the admission controller
            return Context.of(scope).protocol.error_response(queue_full(error))
        except ApiError as error:
            self.state.metrics.observe_rejected(_REASONS.get(error.code, error.code))
            return Context.of(scope).protocol.error_response(error)
        return None

    def _take_large(self, more: int) -> None:
        """Count MiB of large bodies.

        Raises:
            ApiError: there would be too many.
        """
        if self._large_bodies + more > MAX_LARGE_BODIES:
            message = f"{MAX_LARGE_BODIES} MiB of bodies above {LARGE_BODY_BYTES} bytes in transit"
            raise unavailable(message, "large_bodies")
        self._large_bodies += more

    async def _read(self, exchange: _Exchange) -> None:
        """Read a body, unless the client leaves; few large ones at a time."""
        large = 0
        try:
            while await exchange.read_on():
                size = len(exchange.body)
                more = -(-size // MAX_BODY_BYTES) - large if size > LARGE_BODY_BYTES else 0
                if more:
                    self._take_large(more)
                    large += more
        finally:
            self._large_bodies -= large


@dataclass(slots=True)
class _Exchange:
    """The channels of one request, and the state of its exchange."""

    _receive: Receive
    _send: Send
    headers: dict[str, str]  # to add to the response
    announced_bytes: int
    most_bytes: int
    started: float = field(default_factory=time.monotonic)
    body: bytearray = field(default_factory=bytearray)
    batch: int = 0  # MiB as which it counts until it is answered
    dispatched: bool = False  # complete and not refused: the application answers
    read: bool = False  # the application has read the body
    status: int | None = None
    complete: bool = False
    client_left: bool = False

    @property
    def result(self) -> int:
        """Status for metrics and log; a request without an answer counts as failed."""
        return CLIENT_CLOSED_REQUEST if self.client_left else self.status or 500

    async def read_on(self) -> bool:
        """Read a piece of the body; return False after the last one, or if the client left."""
        self._check_size(self.announced_bytes)
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
            return False
        self.body += message.get("body", b"")
        self._check_size(len(self.body))
        return bool(message.get("more_body", False))

    def _check_size(self, size: int) -> None:
        if size > self.most_bytes:
            message = f"the body is larger than {self.most_bytes} bytes"
            raise ApiError(413, message, code="body_too_large")

    async def receive(self) -> Message:
        """Hand the body over, then wait for the client to leave."""
        if not self.read:
            self.read = True
            body, self.body = bytes(self.body), bytearray()
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = not self.complete
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message).update(self.headers)
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)


def _to_origin_form(scope: Scope) -> None:
    """Turn a target that is a whole URL into its path and `Host` header (RFC 9112, 3.2.2)."""
    if scope["path"].startswith("/") or not (match := _ABSOLUTE.fullmatch(scope["raw_path"])):
        return
    path = scope["raw_path"] = match[2] or b"/"
    scope["path"] = unquote(path.decode("ascii"))
    MutableHeaders(scope=scope)["host"] = match[1].decode("ascii")


def _addressed(scope: Scope) -> Protocol:
    """Give the request the path and body type that the endpoints know; return its protocol."""
    _to_origin_form(scope)
    scope["path"] = PATHS.get(scope["path"], scope["path"])
    headers = MutableHeaders(scope=scope)
    protocol = PROTOCOLS.of(scope["path"], headers)
    if protocol.any_media_type and "origin" not in headers:
        # A stranger's page, which has an origin, could send another type without a preflight.
        headers["content-type"] = "application/json"
    return protocol


def _most_bytes(path: str) -> int:
    prompt = PROTOCOLS.prompts.get(path)
    embeds = prompt is not None and prompt.operation == "embeddings"
    return MAX_BATCH_BYTES if embeds else MAX_BODY_BYTES


def _length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0
