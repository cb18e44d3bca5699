"""What every HTTP request gets: an id, a check of its key, a limit on its body, a log line, and an
answer to any failure.

Pure ASGI: the framework's own base class hides that a client left and times streams wrongly.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specops.http.errors import CLIENT_CLOSED_REQUEST, ApiError, internal_error
from specops.system import logs

MAX_BODY_BYTES = 1 << 20
_VALID_ID = re.compile(r"[\x21-\x7e]{1,64}")
_TURNS = 3  # of the event loop, in which it hears of all requests that came together
_QUIET_PATHS = ("/health", "/metrics")  # asked every few seconds
# Open where keys are asked for: what orchestrators and Prometheus ask, and what tells how to ask.
OPEN_PATHS = frozenset(
    {
        *("/", "/health", "/health/live", "/metrics"),
        *("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
    }
)
log = logging.getLogger(__name__)


class RequestContext:
    """Wraps the application.

    The id is the client's `X-Request-ID` if that is short and printable, otherwise a new one; it
    is in `request.state.request_id`, in the response's headers and in every log line. The time of
    arrival is in `request.state.arrival`. What `request.state.log_fields`, where an endpoint sets
    it, returns when the request is over becomes part of its log line.

    Args:
        app: answers.
        keys: what clients must send, see `ApiKeys`.
        rejected: told of each request that sends none of them.
        refuse: answers a request before anything of it is read, or lets it pass with None; may set
            `request.state.release`, which is called at the latest when the request is over. A crowd
            is turned away ten times as fast as if its bodies were read.
        observe_load_test: called with the shape of the load test that a request says it belongs
            to (header `X-Load-Test`), so that dashboards can tell such load from people's.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        rejected: Callable[[], None],
        refuse: Callable[[Scope], Response | None] = lambda scope: None,
        observe_load_test: Callable[[str], None] = lambda shape: None,
    ) -> None:
        self.app = app
        self._keys = keys
        self._rejected = rejected
        self._refuse = refuse
        self._observe_load_test = observe_load_test

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
        if shape := headers.get("x-load-test"):
            self._observe_load_test(shape)
        exchange = _Exchange(receive, send, request_id, _length(headers))
        scope.setdefault("state", {}).update(
            request_id=request_id,
            arrival=exchange.started,
            release=lambda: None,
            client=self._keys.client(headers),
        )
        token = logs.request_id.set(request_id)
        try:
            await self._answer(scope, exchange)
        finally:
            scope["state"]["release"]()
            _log_access(scope, exchange)
            logs.request_id.reset(token)

    async def _answer(self, scope: Scope, exchange: _Exchange) -> None:
        try:
            if not self._keys.open(scope["path"], Headers(scope=scope)):
                self._rejected()
                await _no_key().response()(scope, exchange.receive, exchange.send)
                return
            if (refusal := self._refuse(scope)) is not None:
                await refusal(scope, exchange.receive, exchange.send)
                return
            for _ in range(_TURNS):  # of requests that came together, refused ones are told first
                await asyncio.sleep(0)
            await self.app(scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("request failed")
            if exchange.status is not None:
                raise  # the server must cut the connection: the response is incomplete
            await internal_error().response()(scope, exchange.receive, exchange.send)


class ApiKeys:
    """The keys that open the API; with none configured it is open.

    Args:
        keys: separated by commas.
    """

    def __init__(self, keys: str) -> None:
        # Digests are of one length: comparing them tells nothing of a key, not even its length.
        self._digests = [_digest(key) for key in keys.split(",") if key]

    def open(self, path: str, headers: Headers) -> bool:
        """Whether a request may pass."""
        if not self._digests or path in OPEN_PATHS:
            return True
        scheme, key = _sent(headers)
        given = _digest(key)
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme == "bearer" and any(known)

    def client(self, headers: Headers) -> str:
        """The client: a name for its key; without keys all requests are of one client."""
        return _digest(_sent(headers)[1]).hex()[:16] if self._digests else ""


def _sent(headers: Headers) -> tuple[str, str]:
    """The scheme and the key that a client sent."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return scheme.lower(), key.strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def _no_key() -> ApiError:
    return ApiError(
        401,
        "send one of this server's keys: Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


@dataclass(slots=True)
class _Exchange:
    """One request's channels, and what went through them."""

    _receive: Receive
    _send: Send
    request_id: str
    announced_bytes: int
    started: float = field(default_factory=time.monotonic)
    body_bytes: int = 0
    status: int | None = None
    complete: bool = False
    client_left: bool = False

    async def receive(self) -> Message:
        if self.announced_bytes > MAX_BODY_BYTES:
            raise _too_large()
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = not self.complete
        else:
            self.body_bytes += len(message.get("body", b""))
            if self.body_bytes > MAX_BODY_BYTES:
                raise _too_large()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)


def _length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="body_too_large")


def _log_access(scope: Scope, exchange: _Exchange) -> None:
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"],
        "status": CLIENT_CLOSED_REQUEST if exchange.client_left else exchange.status,
        "seconds": round(time.monotonic() - exchange.started, 4),
    }
    more: Callable[[], dict[str, Any]] | None = scope["state"].get("log_fields")
    if more is not None:
        fields |= more()
    level = logging.DEBUG if scope["path"].startswith(_QUIET_PATHS) else logging.INFO
    log.log(level, "request", extra={"fields": fields})
