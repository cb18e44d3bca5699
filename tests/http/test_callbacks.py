"""A failing callback of the server ends one connection; the process and the others go on."""

import asyncio
import gc
import logging
import socket
import struct
import sys
import weakref
from pathlib import Path
from typing import Any

import h11
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specops.http.server.connection import Connection, Limits
from specops.metrics.series import CALLBACKS
from tests.fakes import FakeService, output
from tests.http.connections import ANSWER, HEAD, LIMITS, WHOLE, Served, served, stream
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio
RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER: close with a reset
LIMIT_OF_THE_SYSTEM = Path("/proc/sys/net/core/somaxconn")
MAX_WAITING = int(LIMIT_OF_THE_SYSTEM.read_text("utf-8")) if LIMIT_OF_THE_SYSTEM.exists() else 0
# What asyncio and uvicorn call, with arguments.
PROTOCOL: dict[str, tuple[Any, ...]] = {
    "data_received": (2 * WHOLE,),
    "eof_received": (),
    "pause_writing": (),
    "resume_writing": (),
    "connection_lost": (None,),
    "on_response_complete": (),
    "timeout_keep_alive_handler": (),
    "shutdown": (),
    "check_deadlines": (),
}


class Broken:
    """A transport whose every method raises."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object, **__: object) -> Any:
            raise OSError(107, f"{name} does not work")

        return fail


class BrokenSocket(socket.socket):
    """A socket whose methods raise from the moment on in which it breaks."""

    broken = False

    def _checked(self, name: str, *arguments: Any) -> Any:
        if self.broken:
            raise OSError(107, f"{name} does not work")
        return getattr(super(), name)(*arguments)

    def send(self, *arguments: Any) -> int:
        return int(self._checked("send", *arguments))

    def recv(self, *arguments: Any) -> bytes:
        return bytes(self._checked("recv", *arguments))

    def shutdown(self, *arguments: Any) -> None:
        self._checked("shutdown", *arguments)

    def setsockopt(self, *arguments: Any) -> None:
        self._checked("setsockopt", *arguments)


def failures(here: Served) -> dict[str, float]:
    registry = here.app.state.specops.metrics.registry
    name = "specops_callback_failures_total"
    counts = {where: registry.get_sample_value(name, {"where": where}) for where in CALLBACKS}
    return {where: count for where, count in counts.items() if count}


def make(here: Served) -> Connection:
    """A connection of the server that no socket has."""
    protocol = here.server.config.http_protocol_class(
        config=here.server.config, server_state=here.server.server_state, app_state={}
    )
    assert isinstance(protocol, Connection)
    return protocol


async def honest(here: Served) -> None:
    client = await here.connect()
    await client.send(WHOLE)
    assert (await client.answer())[0] == 200


def test_every_method_that_others_call_is_in_the_table() -> None:
    asked = {name for name in vars(asyncio.Protocol) if not name.startswith("_")}
    asked |= {name for name in vars(asyncio.BaseProtocol) if not name.startswith("_")}
    # Of uvicorn's own, `handle_events` and its like run within those.
    assert asked - {"connection_made"} <= set(PROTOCOL)
    scheduled = {"timeout_keep_alive_handler", "on_response_complete", "shutdown"}
    assert scheduled <= set(vars(H11Protocol))
    assert scheduled <= set(PROTOCOL)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("name", PROTOCOL)
async def test_a_transport_that_breaks_ends_its_connection_alone(name: str, answered: bool) -> None:
    service = FakeService()
    async with served(service=service) as here:
        client = await here.connect()
        await client.send(WHOLE)
        handle = await service.submitted.get()
        if answered:
            handle.push(ANSWER)
            assert (await client.answer())[0] == 200
        there = client.there
        there._own._transport = Broken()  # type: ignore[assignment]
        getattr(there, name)(*PROTOCOL[name])
        uses_no_transport = {"eof_received", "pause_writing", "resume_writing"}
        if not answered:  # the request goes on
            uses_no_transport |= {"shutdown"}
        if name in uses_no_transport:
            assert not failures(here)
        else:
            assert set(failures(here)) == {"connection"}
            assert there not in here.open
            assert there.timeout_keep_alive_task is None
            if not answered:  # the client is gone, as far as the request is concerned
                await asyncio.wait_for(handle.cancelled.wait(), PATIENCE)
        service.answer = (ANSWER,)
        here.server.server_state.connections.discard(there)
        await honest(here)


async def test_a_transport_that_never_worked_ends_its_connection_alone() -> None:
    async with served() as here:
        connection = make(here)
        connection.connection_made(Broken())  # type: ignore[arg-type]
        assert set(failures(here)) == {"connection"}
        assert not here.open
        await honest(here)


async def test_an_answer_that_cannot_be_written_ends_its_connection_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = FakeService()
    async with served(service=service) as here:
        client = await here.connect()
        handle = await stream(client, service)
        client.there._own._transport = Broken()  # type: ignore[assignment]
        handle.push(output("a"))
        await asyncio.wait_for(handle.cancelled.wait(), PATIENCE)
        await until(lambda: not here.server.server_state.tasks)
        assert set(failures(here)) == {"connection"}
        assert "Exception in ASGI application" not in caplog.text
        service.answer = (ANSWER,)
        await honest(here)


@pytest.mark.parametrize("event", [h11.LocalProtocolError("a state"), ValueError("a header")])
async def test_an_error_of_the_parser_ends_its_connection_alone(
    event: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as here:
        client = await here.connect()

        def fail() -> None:
            raise event

        monkeypatch.setattr(client.there.conn, "next_event", fail)
        client.writer.write(WHOLE)
        assert await client.reader.read() == b""
        await until(lambda: not here.open)
        assert failures(here) == {"connection": 1}
        await honest(here)


@pytest.mark.parametrize("sent", [HEAD, HEAD + b"content-length: 9\r\n\r\n", WHOLE + HEAD])
async def test_a_socket_that_breaks_while_it_is_refused_is_closed_without_a_word(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The client has read the first byte of its 408, and left: `shutdown` says ENOTCONN."""
    async with served() as here:
        mine, theirs = socket.socketpair()
        own = BrokenSocket(fileno=theirs.detach())
        own.setblocking(False)
        loop = asyncio.get_running_loop()
        _, made = await loop.connect_accepted_socket(lambda: make(here), own)
        assert isinstance(made, Connection)
        mine.sendall(sent)
        await until(lambda: made._received == len(sent))
        if sent.startswith(WHOLE):
            await until(lambda: made.cycle and made.cycle.response_complete)
        send, own.send = own.send, lambda data: _break_after(own, send, data)  # type: ignore
        here.check_deadlines(LIMITS.stall)
        await until(lambda: not here.open)
        mine.close()
        assert not failures(here)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        await honest(here)


def _break_after(own: BrokenSocket, send: Any, data: bytes) -> int:
    count = send(data)
    own.broken = True
    return int(count)


async def test_sixty_clients_that_leave_at_the_first_byte_of_their_refusal() -> None:
    async with served() as here:
        object.__setattr__(here.server.config, "backlog", 100)
        clients = [await here.connect() for _ in range(LIMITS.connections)]
        for _ in range(15):
            for client in clients:
                await client.send(b"GET /h")
            here.check_deadlines(LIMITS.stall)
            for client in clients:
                await client.reader.readexactly(1)
                own = client.writer.get_extra_info("socket")
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                client.writer.close()
            here.check_deadlines(2)
            await until(lambda: not here.open)
            here.clients.clear()
            clients = [await here.connect() for _ in range(LIMITS.connections)]
        for client in clients[1:]:
            client.writer.close()
        assert here.closed() == {"slow_headers": 15 * LIMITS.connections}
        assert not failures(here)


async def test_a_tick_that_fails_does_not_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as here:

        async def fail(*_: object) -> bool:
            raise RuntimeError("no date today")

        monkeypatch.setattr(uvicorn.Server, "on_tick", fail)
        await until(lambda: failures(here).get("tick", 0) > 2)
        await honest(here)


async def test_a_connection_that_cannot_be_looked_at_does_not_stop_the_look() -> None:
    async with served() as here:
        first, second = await here.connect(), await here.connect()
        for client in (first, second):
            await client.send(b"GET /h")
        first.there._limits = None  # type: ignore[assignment]
        here.check_deadlines(LIMITS.stall)
        assert (await second.answer())[0] == 408
        assert await first.reader.read() == b""
        assert failures(here) == {"connection": 1}


async def test_what_nobody_catches_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as here:
        loop = asyncio.get_running_loop()

        def fail() -> None:
            raise RuntimeError("a timer")

        for _ in range(500):
            loop.call_soon(fail)
            loop.call_later(0, fail)
        await until(lambda: failures(here) == {"loop": 1000})
        lines = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(lines) == 1
        assert lines[0].exc_info
        await honest(here)


async def test_a_reset_leaves_nothing_behind() -> None:
    """uvicorn's timer for idle connections would keep each of them for more than a minute."""
    async with served() as here:
        client = await here.connect()
        await client.send(WHOLE)
        assert (await client.answer())[0] == 200
        there = weakref.ref(client.there)
        own = client.writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        here.clients.clear()
        client.writer.close()
        await until(lambda: not here.open)
        del client, own
        await asyncio.sleep(0)
        gc.collect()
        assert there() is None


async def test_a_client_that_resets_within_a_stream_ends_its_request() -> None:
    service = FakeService()
    async with served(service=service) as here:
        client = await here.connect()
        handle = await stream(client, service)
        handle.push(ANSWER)
        await client.reader.readuntil(b"\r\n\r\n")
        second = await here.connect()
        other = await stream(second, service)
        own = second.writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        second.writer.close()
        await asyncio.wait_for(other.cancelled.wait(), PATIENCE)
        assert not failures(here)


@pytest.mark.skipif(sys.platform != "linux", reason="no such figures of a listening socket")
async def test_many_connections_wait_and_few_are_taken_in_at_once() -> None:
    """Else a flood of resets would be a crowd of open connections, and honest ones be refused."""
    async with served(Limits(connections=2048)) as here:
        (listener,) = (own for server in here.server.servers for own in server.sockets)
        info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        waiting, most = struct.unpack_from("II", info, 24)  # tcpi_unacked and tcpi_sacked
        assert (waiting, most) == (0, min(1024, MAX_WAITING))
        assert here.server.config.backlog == 64
