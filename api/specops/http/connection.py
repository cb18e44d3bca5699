"""One HTTP connection with deadlines, so that slow clients cannot take all connections.

uvicorn has one deadline, for connections between two requests. A client that sends half a request,
or does not read its answer, would stay for ever, and enough of them take every descriptor. Here
the server looks at each connection once a second and closes those that got no further. Time is
counted in such looks: where the whole process stood still, no client is blamed for it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specops.http.errors import ApiError, unavailable
from specops.http.sse import UNFRAMED

_LINGERING = 1  # looks, until a client must have read its refusal
# Loopback lets 2.6 MB of an unread answer pile up in the kernel, for each connection; an answer's
# events are 0.3 KB each, and pages go out at 1 MB/s to a client that is 60 ms away.
_SEND_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may take. Times are in looks, of which there is one a second.

    Attributes:
        connections: open at the same time; one more is refused with 503.
        stall: in the midst of a request without a byte of it; TCP gets over four lost packets in
            a row within 3 s.
        headers: from a connection's beginning, or a later request's first byte, to the end of its
            headers. They fit into a packet or two.
        body: of a request; 1 MiB, the most, at 35 KB/s.
        unread: without a byte read of an answer that waits to be read.
        reading: in which some of an answer waits to be read. What waits is less than 64 KB.
        idle: between two requests. Longer than the minute after which load balancers drop idle
            connections: they go first.
    """

    connections: int
    stall: int = 5
    headers: int = 10
    body: int = 30
    unread: int = 15
    reading: int = 60
    idle: int = 75


class _Transport:
    """A transport that knows how many bytes it was given, and asks before it closes."""

    def __init__(self, transport: asyncio.Transport, lingers: Callable[[], bool]) -> None:
        self._transport = transport
        self._lingers = lingers
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def close(self) -> None:
        if not self._lingers():
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """uvicorn's, with limits.

    Args:
        closed: told why a connection was closed unasked, one of `series.CLOSINGS`.
    """

    def __init__(self, limits: Limits, closed: Callable[[str], None], **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._closed = closed
        self._refused = False
        self._aborted = False
        self._received = 0  # bytes
        self._seen: tuple[object, ...] = ()  # what the client was at in the last look
        self._amount = 0  # bytes it had sent then, or taken
        self._looks = self._still = 0  # since it is at that; since a byte went through

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let a client in, or say that there are too many."""
        self._own = _Transport(transport, self._lingers)
        super().connection_made(cast(asyncio.Transport, self._own))
        own: socket.socket = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        over = len(self.connections) - self._limits.connections
        if over <= 0:
            return
        self._closed("full")
        if over > self._limits.connections // 8 + 1:  # too many even to be told
            self._abort()
        else:
            self._refuse(unavailable("too many open connections", "connections"))

    def data_received(self, data: bytes) -> None:
        """Take in what the client sent, unless it was refused."""
        if not self._refused:
            self._received += len(data)
            super().data_received(data)

    def handle_events(self) -> None:
        """Take in requests, and send a stream without chunks where one asks for that."""
        super().handle_events()
        if self.cycle is not None and UNFRAMED in self.headers:
            self.conn.their_http_version = b"1.0"  # a body of unknown length ends the connection

    def look(self) -> None:
        """Let go of the client if it was too slow; to be called once a second."""
        if self._aborted:
            return
        waiting = self.transport.get_write_buffer_size()
        reason = self._waits_for(waiting)
        amount = self._own.written - waiting if reason == "unread" else self._received
        # Another request is another beginning, though the client may be at the same again.
        if (seen := (reason, self.cycle)) != self._seen:
            self._seen, self._looks, self._still = seen, 0, 0
        else:
            self._looks += 1
            self._still = self._still + 1 if amount == self._amount else 0
        self._amount = amount
        limits = self._limits
        stall, whole = {
            "slow_headers": (limits.stall if self._received else limits.headers, limits.headers),
            "slow_body": (limits.stall, limits.body),
            "unread": (limits.unread, limits.reading),
            "refused": (_LINGERING, _LINGERING),
        }.get(reason, (self._looks + 1, self._looks + 1))
        if self._still >= stall or self._looks >= whole:
            self._let_go(reason)

    def _waits_for(self, waiting: int) -> str:
        """What the client has to do next, by what it is called where it does not; or nothing."""
        if self._refused:
            return "refused"
        if waiting:
            return "unread"
        if self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused:
            return "slow_body"
        begun = self.cycle is None or self.conn.trailing_data[0]
        if self.conn.their_state is h11.IDLE and begun:
            return "slow_headers"
        return ""  # we have to answer, or uvicorn's own deadline runs

    def _let_go(self, reason: str) -> None:
        if reason != "refused":
            self._closed(reason)
        answered = reason == "slow_body" and self.cycle.response_complete  # before it was whole
        if reason in ("slow_headers", "slow_body") and self._received and not answered:
            self._refuse(ApiError(408, "the request did not arrive in time", code="slow_request"))
        else:
            self._abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, which learns that the client is gone; then close."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self._abort()
                return
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
        response = error.response(self._path())
        response.headers["connection"] = "close"
        status = HTTPStatus(response.status_code)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self._linger()

    def _path(self) -> str:
        """Of the request that the client is at, as far as it has said; empty before that."""
        if self.cycle is not None and not self.cycle.response_complete:
            return str(self.cycle.scope["path"])
        method_and_path = self.conn.trailing_data[0].split(b"\r", 1)[0].split(b" ")[:2]
        return method_and_path[-1].decode("latin-1") if len(method_and_path) > 1 else ""

    def _lingers(self) -> bool:
        """Called instead of closing; whether the client is in the midst of a request."""
        if self._refused or self.transport.is_closing():
            return False
        if half := self.conn.their_state is h11.SEND_BODY:
            self._linger()
        return half

    def _linger(self) -> None:
        """Close, but for what the client still sends, which is dropped for a while.

        Closed at once, the connection would be reset and the answer lost.
        """
        self._refused = True
        self.transport.write_eof()

    def _abort(self) -> None:
        """Close without sending what waits to be read."""
        self._aborted = True
        self.transport.abort()

    def shutdown(self) -> None:
        """End with the server, which takes in no rest of a request; called by uvicorn."""
        if self._waits_for(0) == "slow_body" and not self.cycle.response_complete:
            self._refuse(unavailable("the server is ending", "model_draining"))
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; called by uvicorn."""
        self._closed("malformed")
        self._refuse(ApiError(400, "this is no HTTP/1.1 request", code="malformed_request"))

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a request; called by uvicorn."""
        if not self.transport.is_closing():
            self._closed("idle")
        super().timeout_keep_alive_handler()
