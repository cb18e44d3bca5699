"""What every HTTP request gets: an id, a check of its key, a limit on its body, a log line, and an
answer to any failure.

A body is read whole before the application sees a request: half a one takes no place from others.

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

from specops.http.errors import CLIENT_CLOSED_REQUEST, ApiError, internal_error, unavailable
from specops.system import logs

MAX_BODY_BYTES = 1 << 20
# Bodies of 64 KiB, 16,000 tokens, are rare; that many of 1 MiB are 64 MB that no plan knows of.
LARGE_BODY_BYTES = 1 << 16
MOST_LARGE_BODIES = 64
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
        keys: what clients must send, see `ApiKeys`.
        rejected: told why, for each request that is turned away here.
        refuse: answers a request, or lets it pass with None. It is asked before the body is read
            and again, with True, when that is whole: then it may set `request.state.release`, which
            is called at the latest when the request is over. A crowd is turned away ten times as
            fast as if its bodies were parsed.
        observe_load_test: called with the shape of the load test that a request says it belongs
            to (header `X-Load-Test`), so that dashboards can tell such load from people's.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        rejected: Callable[[str], None],
        refuse: Callable[[Scope, bool], Response | None] = lambda scope, whole: None,
        observe_load_test: Callable[[str], None] = lambda shape: None,
    ) -> None:
        self.app = app
        self._keys = keys
        self._rejected = rejected
        self._refuse = refuse
        self._observe_load_test = observe_load_test
        self._large_bodies = 0  # that are being read

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
            if (answer := await self._early_answer(scope, exchange)) is not None:
                await answer(scope, exchange.receive, exchange.send)
                return
            if exchange.client_left:
                return
            for _ in range(_TURNS):  # of requests that came together, refused ones are told first
                await asyncio.sleep(0)
            await self.app(scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("request failed")
            if exchange.status is not None:
                raise  # the server must cut the connection: the response is incomplete
            await internal_error().response(scope["path"])(scope, exchange.receive, exchange.send)

    async def _early_answer(self, scope: Scope, exchange: _Exchange) -> Response | None:
        """Read a request that may pass, or say why it may not."""
        try:
            if not self._keys.open(scope["path"], Headers(scope=scope)):
                raise _no_key()
            if (refusal := self._refuse(scope, False)) is not None:
                return refusal
            await self._read(exchange)
        except _Refused as refused:
            self._rejected(refused.reason)
            return refused.answer.response(scope["path"])
        return None if exchange.client_left else self._refuse(scope, True)

    async def _read(self, exchange: _Exchange) -> None:
        """Take in a body, or learn that the client has left; only so many large ones at a time."""
        large = False
        try:
            while await exchange.read_on():
                if len(exchange.body) > LARGE_BODY_BYTES and not large:
                    if self._large_bodies == MOST_LARGE_BODIES:
                        raise _too_many_large()
                    large = True
                    self._large_bodies += 1
        finally:
            self._large_bodies -= large


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
    if key := headers.get("x-api-key"):  # as Anthropic's clients send it
        return "bearer", key.strip()
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return scheme.lower(), key.strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


class _Refused(Exception):  # noqa: N818 - a state, not a fault
    """A request is answered before the application; `reason` is one of `series.REJECTIONS`."""

    def __init__(self, reason: str, answer: ApiError) -> None:
        super().__init__(reason)
        self.reason = reason
        self.answer = answer


@dataclass(slots=True)
class _Exchange:
    """One request's channels, and what went through them."""

    _receive: Receive
    _send: Send
    request_id: str
    announced_bytes: int
    started: float = field(default_factory=time.monotonic)
    body: bytearray = field(default_factory=bytearray)
    read: bool = False  # by the application
    status: int | None = None
    complete: bool = False
    client_left: bool = False

    async def read_on(self) -> bool:
        """Read a piece of the body; False where that was the last, or the client has left."""
        if self.announced_bytes > MAX_BODY_BYTES:
            raise _too_large()
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
            return False
        self.body += message.get("body", b"")
        if len(self.body) > MAX_BODY_BYTES:
            raise _too_large()
        return bool(message.get("more_body", False))

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
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)


def _length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _no_key() -> _Refused:
    return _Refused(
        "unauthorized",
        ApiError(
            401,
            "send one of this server's keys: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        ),
    )


def _too_large() -> _Refused:
    message = f"the body is larger than {MAX_BODY_BYTES} bytes"
    return _Refused("too_large", ApiError(413, message, code="body_too_large"))


def _too_many_large() -> _Refused:
    message = f"{MOST_LARGE_BODIES} bodies of more than {LARGE_BODY_BYTES} bytes are on their way"
    return _Refused("large_bodies", unavailable(message, "large_bodies"))


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
