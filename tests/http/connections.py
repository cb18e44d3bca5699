"""A server on the loopback interface and raw clients; the test says when it looks at them."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

import specops
from specops.config import Settings
from specops.http.app import create_app
from specops.http.server.connection import Connection, Limits
from specops.http.server.server import make_server
from specops.metrics.series import CLOSINGS
from specops.request import FinishReason
from tests.fakes import FakeHandle, FakeService, output
from tests.waiting import PATIENCE, printed, until

LIMITS = Limits(connections=4)
BODY = b'{"prompt": "abc"}'
HEAD = b"POST /generate HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
ANSWER = output("abc", finish=FinishReason.STOP)


class Client:
    """A connection, and the server's end of it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.there: Connection

    async def send(self, content: bytes) -> None:
        """Send, and wait until the server has it."""
        before = self.there._received
        self.writer.write(content)
        await until(lambda: self.there._received == before + len(content))

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        lines = (line.partition(": ") for line in head[1:] if line)
        headers = {name.lower(): value for name, _, value in lines}
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(body)


class Served:
    """A server on the loopback interface; the test says when it looks at its connections."""

    port: int
    task: asyncio.Task[None]  # the server's
    client: httpx.AsyncClient  # where a test wants one

    def __init__(self, limits: Limits, service: FakeService) -> None:
        self.service = service
        self.app = create_app(Settings(), service)  # type: ignore[arg-type]
        self.server = make_server(self.app, Settings(), limits)
        self.server.config.timeout_graceful_shutdown = round(PATIENCE)
        self.look = self.server.check_deadlines
        self.server.check_deadlines = lambda: None  # type: ignore[method-assign] - once a second
        self.clients: list[Client] = []

    @property
    def open(self) -> set[Any]:
        return self.server.server_state.connections

    async def connect(self, receive_bytes: int = 0) -> Client:
        before = set(self.open)
        own = socket.socket()
        if receive_bytes:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self.port))
        client = Client(*await asyncio.open_connection(sock=own))
        await until(lambda: len(self.open - before) == 1)
        (client.there,) = self.open - before
        self.clients.append(client)
        return client

    def check_deadlines(self, times: int) -> None:
        for _ in range(times + 1):  # the first one sees what there is
            self.look()

    def closed(self) -> dict[str, float]:
        registry = self.app.state.specops.metrics.registry
        name = "specops_connections_closed_total"
        counts = {why: registry.get_sample_value(name, {"reason": why}) for why in CLOSINGS}
        return {why: count for why, count in counts.items() if count}


async def stream(client: Client, service: FakeService) -> FakeHandle:
    """Ask for a stream."""
    content = b'{"prompt": "abc", "stream": true}'
    await client.send(HEAD + b"content-length: %d\r\n\r\n" % len(content) + content)
    return await service.submitted.get()


async def fill(client: Client, handle: FakeHandle, least: int) -> None:
    """Send more of the answer than the client reads."""
    async with asyncio.timeout(PATIENCE):
        while client.there.transport.get_write_buffer_size() < least:
            handle.push(output("a" * 4096))
            await asyncio.sleep(0)


@asynccontextmanager
async def served(
    limits: Limits = LIMITS, service: FakeService | None = None
) -> AsyncIterator[Served]:
    here = Served(limits, service or FakeService([ANSWER]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here.port = listener.getsockname()[1]
        here.task = asyncio.create_task(here.server.serve([listener]))
        await until(lambda: here.server.started)
        yield here
        for client in here.clients:
            client.writer.close()
        here.server.should_exit = True
        await here.task


def imported_by(module: str) -> set[str]:
    """The modules that a fresh interpreter loads with this one."""
    env = {"PYTHONPATH": str(Path(specops.__file__).parents[1])}
    return set(printed(f"import sys, {module}; print(*sys.modules)", env=env).split())
