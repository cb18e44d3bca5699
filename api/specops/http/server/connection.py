"""One HTTP connection with deadlines, so that slow clients cannot take all connections.

uvicorn has one deadline, for connections between two requests. A client that sends half a request,
or does not read its answer, would stay forever, and enough of them take every file descriptor.
Here the server looks at each connection once a second and closes those without progress. Time is
counted in such looks rather than by a clock, so that no client pays for a pause of the process.

Whatever goes wrong in a connection's callbacks closes only that connection.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from http import HTTPStatus
from typing import Any, Concatenate, ParamSpec, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specops.http.errors import ApiError, unavailable
from specops.http.protocols import PROTOCOLS
from specops.http.sse import UNFRAMED
from specops.system.failures import Failures

_LINGERING = 1  # looks; after that a client must have read its refusal
# Without this limit the kernel holds up to 2.6 MB of an unread answer per connection on loopback.
# It suffices: an event has 0.3 KB, and a page goes at 1 MB/s to a client 60 ms away.
_SEND_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a client. Times are in looks, one per second.

    Attributes:
        connections: number of open connections; the next one is refused with 503.
        stall: time within a request without a byte of it; TCP recovers from four lost packets in
            a row within 3 s.
        headers: time from a connection's beginning, or from a later request's first byte, to the
            end of the headers. They fit into a packet or two.
        body: time for a request's body; the largest, 1 MiB, comes at 35 KB/s.
        unread: time without a byte read, while some of the answer waits.
        reading: time in which some of the answer, less than 64 KB, waits.
        idle: time between two requests; longer than the minute after which load balancers drop
            idle connections, so that they close first.
    """

    connections: int
    stall: int = 5
    headers: int = 10
    body: int = 30
    unread: int = 15
    reading: int = 60
    idle: int = 75


class _Transport:
    """A transport that sends everything written within one turn of the event loop together.

    uvicorn writes an answer's head and body separately: in one piece they take one system call, and
    a server that is killed has sent both or neither.

    Attributes:
        sent: bytes that went to the socket, or wait for it.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection
        self._held: list[bytes] = []
        self.sent = 0

    def write(self, data: bytes) -> None:
        if not self._held:
            self._connection.loop.call_soon(self.flush)
        self._held.append(data)

    def flush(self) -> None:
        """Send the bytes written since the last turn."""
        if data := b"".join(self._held):
            self._held = []
            self.sent += len(data)
            self._connection.call_guarded(self._transport.write, data)

    def close(self) -> None:
        self.flush()
        self._connection.call_guarded(self._close)

    def _close(self) -> None:
        if not self._connection.lingers():
            self._transport.close()

    def abort(self) -> None:
        self._held = []
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


_Arguments = ParamSpec("_Arguments")
_Callback = Callable[Concatenate["Connection", _Arguments], None]


def _guarded(callback: _Callback[_Arguments]) -> _Callback[_Arguments]:
    """Drop the connection if this method, a callback of asyncio, uvicorn or the server, fails."""

    @wraps(callback)
    def call(self: Connection, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        self.call_guarded(callback, self, *args, **kwargs)

    return call


class Connection(H11Protocol):
    """uvicorn's connection, with limits.

    Args:
        limits: the limits of a client.
        closed: called with the reason, one of `series.CLOSINGS`, when the server closes a
            connection.
        failures: counts the connections that were dropped because a callback failed.
        uvicorn: the arguments of `H11Protocol`.
    """

    def __init__(
        self, limits: Limits, closed: Callable[[str], None], failures: Failures, **uvicorn: Any
    ) -> None:
        super().__init__(**uvicorn)
        self._limits = limits
        self._closed = closed
        self._failures = failures
        self._refused = False
        self._aborted = False
        self._received = 0  # bytes
        self._seen: tuple[object, ...] = ()  # what the client had to do at the last look
        self._amount = 0  # bytes that it had sent, or read, by then
        self._looks = self._still = 0  # looks since that began; looks since the last byte

    def call_guarded(
        self, call: Callable[_Arguments, None], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> None:
        """Call a function; if it fails, drop only this connection.

        Args:
            call: the function.
            args: its arguments.
            kwargs: its named arguments.
        """
        try:
            call(*args, **kwargs)
        except Exception as error:
            self._failures.report("connection", error)
            self._drop()

    def _drop(self) -> None:
        """End the connection and its request, whatever state they are in."""
        self.connections.discard(self)
        self._unset_keepalive_if_required()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.flow is not None:
            self.flow.resume_writing()
        with self._failures.report_errors("connection"):
            self._abort()

    @_guarded
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let a client in, or refuse it if there are too many."""
        self._own = _Transport(transport, self)
        super().connection_made(cast(asyncio.Transport, self._own))
        own: socket.socket = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        over = len(self.connections) - self._limits.connections
        if over <= 0:
            return
        self._closed("full")
        if over > self._limits.connections // 8 + 1:  # too many to answer
            self._abort()
        else:
            self._refuse(unavailable("too many open connections", "connections"))

    @_guarded
    def connection_lost(self, exc: Exception | None) -> None:
        """End the request of a client that left."""
        self._unset_keepalive_if_required()  # after a reset, uvicorn would keep it for 75 s
        super().connection_lost(exc)

    @_guarded
    def eof_received(self) -> None:
        """Let asyncio close the connection of a client that sends no more."""

    pause_writing = _guarded(H11Protocol.pause_writing)
    resume_writing = _guarded(H11Protocol.resume_writing)
    on_response_complete = _guarded(H11Protocol.on_response_complete)

    @_guarded
    def data_received(self, data: bytes) -> None:
        """Receive the client's bytes, unless the client was refused."""
        if not self._refused and not self._aborted:
            self._received += len(data)
            super().data_received(data)

    def handle_events(self) -> None:
        """Start requests; send a stream without chunks if the request says so."""
        super().handle_events()
        if self.cycle is not None and UNFRAMED in self.headers:
            self.conn.their_http_version = b"1.0"  # a body of unknown length ends the connection

    @_guarded
    def check_deadlines(self) -> None:
        """Close the connection if the client was too slow; called once a second."""
        if self._aborted:
            return
        waiting = self.transport.get_write_buffer_size()
        reason, stall, whole = self._deadline(waiting)
        amount = self._own.sent - waiting if reason == "unread" else self._received
        # Each request starts from zero, even if the client must do the same as before.
        if (seen := (reason, self.cycle)) != self._seen:
            self._seen, self._looks, self._still = seen, 0, 0
        else:
            self._looks += 1
            self._still = self._still + 1 if amount == self._amount else 0
        self._amount = amount
        if self._still >= stall or self._looks >= whole:
            self._close_slow(reason)

    def _deadline(self, waiting: int) -> tuple[str, float, float]:
        """Return the reason to close the connection if the client does nothing from now on.

        Args:
            waiting: bytes of the answer that the client has not read.

        Returns:
            The reason; the allowed looks without a byte; the allowed looks in total.
        """
        limits = self._limits
        if self._refused:
            return "refused", _LINGERING, _LINGERING
        if waiting:
            return "unread", limits.unread, limits.reading
        if self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused:
            return "slow_body", limits.stall, limits.body
        begun = self.cycle is None or self.conn.trailing_data[0]
        if self.conn.their_state is h11.IDLE and begun:
            stall = limits.stall if self._received else limits.headers
            return "slow_headers", stall, limits.headers
        return "", math.inf, math.inf  # the server must answer, or uvicorn's deadline runs

    def _close_slow(self, reason: str) -> None:
        if reason != "refused":
            self._closed(reason)
        answered = reason == "slow_body" and self.cycle.response_complete  # before the body's end
        if reason in ("slow_headers", "slow_body") and self._received and not answered:
            self._refuse(ApiError(408, "the request did not arrive in time", code="slow_request"))
        else:
            self._abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer instead of the application, which sees the client leave, and close."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self._abort()
                return
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
        response = PROTOCOLS.of(self._path()).error_response(error)
        response.headers["connection"] = "close"
        status = HTTPStatus(response.status_code)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self._linger()

    def _path(self) -> str:
        """Return the current request's path; empty before the client has sent it."""
        if self.cycle is not None and not self.cycle.response_complete:
            return str(self.cycle.scope["path"])
        method_and_path = self.conn.trailing_data[0].split(b"\r", 1)[0].split(b" ")[:2]
        return method_and_path[-1].decode("latin-1") if len(method_and_path) > 1 else ""

    def lingers(self) -> bool:
        """Return whether the client is still sending a request; called instead of closing."""
        if self._refused or self.transport.is_closing():
            return False
        if half := self.conn.their_state is h11.SEND_BODY:
            self._linger()
        return half

    def _linger(self) -> None:
        """Send no more, but drop the client's data for a while before closing.

        Closing at once would reset the connection and lose the answer.
        """
        self._refused = True
        self._own.flush()
        if self.transport.get_write_buffer_size():
            return  # asyncio would end the stream later, outside a guarded call
        try:
            self.transport.write_eof()
        except OSError:  # the client has left already
            self._abort()

    def _abort(self) -> None:
        """Close without sending the rest of the answer."""
        self._aborted = True
        self.transport.abort()

    @_guarded
    def shutdown(self) -> None:
        """End a connection when the server ends; called by uvicorn."""
        if self._deadline(0)[0] == "slow_body" and not self.cycle.response_complete:
            self._refuse(unavailable("the server is ending", "model_draining"))
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP; called by uvicorn."""
        self._closed("malformed")
        self._refuse(ApiError(400, "this is not an HTTP/1.1 request", code="malformed_request"))

    @_guarded
    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a request; called by uvicorn."""
        if not self.transport.is_closing():
            self._closed("idle")
        super().timeout_keep_alive_handler()
