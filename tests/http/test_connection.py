"""Clients that are too slow, too many, or not HTTP are answered, counted and disconnected."""

import asyncio
from typing import Any

import pytest

from specops.http.middleware import MAX_LARGE_BODIES
from specops.http.security.request_body import LARGE_BODY_BYTES, MAX_BODY_BYTES
from specops.http.server.connection import Limits
from specops.runtime.memory_plan import spare_bytes
from specops.serving.admission import QueueFull
from tests.fakes import FakeService, output
from tests.http.connections import (
    ANSWER,
    BODY,
    HEAD,
    LIMITS,
    WHOLE,
    Served,
    fill,
    served,
    stream,
)
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (HEAD, "slow_headers"),
        (HEAD + b"content-length: 17\r\n\r\n" + BODY[:9], "slow_body"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n", "slow_body"),
        (WHOLE + HEAD, "slow_headers"),  # in a later request
    ],
)
async def test_half_a_request_is_answered_408_and_never_submitted(sent: bytes, reason: str) -> None:
    async with served() as here:
        client = await here.connect()
        await client.send(sent)
        if sent.startswith(WHOLE):
            assert (await client.answer())[0] == 200
        before = len(here.service.requests)
        here.check_deadlines(LIMITS.stall)
        status, headers, body = await client.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert body["error"]["code"] == "slow_request"
        assert await client.reader.read() == b""
        client.writer.close()
        await until(lambda: not here.open)
        assert here.closed() == {reason: 1}
        assert len(here.service.requests) == before


async def test_a_stream_without_chunks_ends_with_its_connection_and_a_mark() -> None:
    async with served() as here:
        client = await here.connect()
        asks = HEAD + b"x-specops-unframed: 1\r\n"
        # What has a length is no stream: the connection stays open.
        await client.send(asks + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        status, headers, _ = await client.answer()
        assert status == 200
        assert not {"connection", "x-specops-unframed"} & set(headers)
        content = b'{"prompt": "abc", "stream": true}'
        await client.send(asks + b"content-length: %d\r\n\r\n" % len(content) + content)
        head, _, body = (await client.reader.read()).partition(b"\r\n\r\n")
    lines = set(head.lower().split(b"\r\n"))
    assert {b"connection: close", b"x-specops-unframed: 1"} <= lines
    assert not any(line.startswith((b"transfer-encoding", b"content-length")) for line in lines)
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n\x04")


class Noting:
    """A transport that notes what is written to it."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        self.transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


@pytest.mark.parametrize(
    ("body", "status", "ends"),
    [
        (BODY, 200, b"}"),
        (b'{"prompt": "abc", "stream": true}', 200, b"\r\n0\r\n\r\n"),
        (b"{}", 422, b"}"),
    ],
)
async def test_an_answers_head_and_body_are_one_write(
    body: bytes, status: int, ends: bytes
) -> None:
    """A server that is killed has sent both or neither."""
    async with served() as here:
        client = await here.connect()
        noting = client.there._own._transport = Noting(client.there._own._transport)  # type: ignore[assignment]
        await client.send(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: bool(noting.writes) and noting.writes[-1].endswith(ends))
        assert await client.reader.readuntil(ends)
    (answer,) = noting.writes
    assert answer.startswith(b"HTTP/1.1 %d " % status)


async def test_a_streams_head_is_written_with_its_first_event() -> None:
    service = FakeService()
    async with served(service=service) as here:
        client = await here.connect()
        noting = client.there._own._transport = Noting(client.there._own._transport)  # type: ignore[assignment]
        handle = await stream(client, service)
        for text, writes in (("a", 1), ("b", 2)):
            handle.push(output(text))
            await until(lambda: len(noting.writes) == writes)  # noqa: B023
    first, second = noting.writes
    assert first.startswith(b"HTTP/1.1 200 ")
    assert b"data: {" in first
    assert b"data: {" in second


MESSAGES = HEAD.replace(b"/generate", b"/v1/messages")
HALF = b"content-length: 17\r\n\r\n" + BODY[:9]


@pytest.mark.parametrize("before", [b"", WHOLE])
@pytest.mark.parametrize(
    ("sent", "ends"),
    [
        *((head + HALF, ends) for head in (HEAD, MESSAGES) for ends in (False, True)),
        (MESSAGES[:40], False),
    ],
)
async def test_refusals_have_the_shape_of_the_protocol_that_is_spoken(
    sent: bytes, before: bytes, ends: bool
) -> None:
    """Also behind another request on the same connection, and when the server ends."""
    async with served() as here:
        client = await here.connect()
        await client.send(before + sent)
        if before:
            assert (await client.answer())[0] == 200
        if ends:
            here.server.should_exit = True
        else:
            here.check_deadlines(LIMITS.stall)
        status, headers, body = await client.answer()
    assert (status, headers["connection"]) == (503 if ends else 408, "close")
    assert (int(headers.get("retry-after", 0)) > 0) == ends
    if sent.startswith(MESSAGES[:40]):
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    else:
        assert body["error"]["code"] == ("model_draining" if ends else "slow_request")


async def test_a_connection_without_a_request_is_closed_without_a_word() -> None:
    async with served() as here:
        client = await here.connect()
        here.check_deadlines(LIMITS.stall)
        assert here.open
        here.check_deadlines(LIMITS.headers)
        assert await client.reader.read() == b""
        await until(lambda: not here.open)
        assert here.closed() == {"slow_headers": 1}


@pytest.mark.parametrize(
    ("start", "piece", "most"),
    [
        (HEAD, b"a: b\r\n", LIMITS.headers),
        (HEAD + b"content-length: 1000\r\n\r\n", b"1", LIMITS.body),
    ],
)
async def test_a_byte_now_and_then_does_not_keep_a_connection_for_ever(
    start: bytes, piece: bytes, most: int
) -> None:
    async with served() as here:
        client = await here.connect()
        await client.send(start)
        here.look()
        for _ in range(most - 1):
            await client.send(piece)
            here.look()
        assert not here.closed()
        here.look()
        assert (await client.answer())[0] == 408


async def test_the_server_looks_once_a_second() -> None:
    server, looks = Served(LIMITS, FakeService()).server, list[int]()
    for tick in range(30):  # uvicorn has ten in a second
        server.check_deadlines = lambda tick=tick: looks.append(tick)  # type: ignore
        await server.on_tick(tick)
    assert looks == [0, 10, 20]


async def test_requests_that_follow_each_other_are_not_taken_for_a_slow_one() -> None:
    async with served() as here:
        client = await here.connect()
        for _ in range(2 * LIMITS.headers):
            await client.send(WHOLE[:30])
            here.look()
            await client.send(WHOLE[30:-5])
            here.look()
            await client.send(WHOLE[-5:])
            assert (await client.answer())[0] == 200
        assert not here.closed()


async def test_a_client_that_waits_for_its_answer_keeps_its_connection() -> None:
    service = FakeService()
    async with served(service=service) as here:
        client = await here.connect()
        await client.send(WHOLE)
        handle = await service.submitted.get()
        here.check_deadlines(10 * LIMITS.idle)
        handle.push(ANSWER)
        assert (await client.answer())[0] == 200
        assert not here.closed()


async def test_a_client_that_does_not_read_is_cut_off_and_its_request_ends() -> None:
    service = FakeService()
    async with served(service=service) as here:
        client = await here.connect(receive_bytes=4096)
        handle = await stream(client, service)
        await fill(client, handle, 1)
        here.check_deadlines(LIMITS.unread)
        await until(lambda: not here.open)
        await asyncio.wait_for(handle.cancelled.wait(), PATIENCE)
        assert here.closed() == {"unread": 1}


async def test_a_client_that_reads_slowly_keeps_its_connection() -> None:
    """However much there is to read at each look."""
    service = FakeService()
    async with served(service=service) as here:
        client = await here.connect(receive_bytes=4096)
        handle = await stream(client, service)
        for _ in range(LIMITS.unread + 5):
            await fill(client, handle, 40_000)
            here.look()
            await client.reader.readexactly(30_000)
        assert not here.closed()


async def test_a_refused_client_that_goes_on_sending_is_closed() -> None:
    service = FakeService()
    service.refusal = QueueFull(12)
    async with served(service=service) as here:
        client = await here.connect()
        await client.send(HEAD + b"content-length: 1000\r\n\r\nabc")
        assert (await client.answer())[0] == 429
        here.check_deadlines(LIMITS.stall)
        assert await client.reader.read() == b""
        assert here.closed() == {"slow_body": 1}


async def test_an_answer_that_comes_before_the_end_of_a_body_is_not_lost() -> None:
    """A connection that is closed with bytes unread is reset, and its answer with it."""
    async with served() as here:
        client = await here.connect()
        head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1)
        client.writer.write(head + b" " * (MAX_BODY_BYTES + 1))
        await until(lambda: client.there.cycle and client.there.cycle.response_complete)
        assert (await client.answer())[0] == 413
        assert await client.reader.read() == b""
        client.writer.close()
        await until(lambda: not here.open)
        assert not here.closed()


async def test_one_connection_too_many_is_refused() -> None:
    async with served(Limits(connections=2)) as here:
        clients = [await here.connect() for _ in range(3)]
        clients[2].writer.write(WHOLE)
        status, headers, body = await clients[2].answer()
        assert (status, headers["connection"]) == (503, "close")
        assert int(headers["retry-after"]) > 0
        assert body["error"]["code"] == "connections"
        assert await clients[2].reader.read() == b""
        clients[2].writer.close()
        clients[1].writer.close()
        await until(lambda: len(here.open) == 1)
        again = await here.connect()
        await again.send(WHOLE)
        assert (await again.answer())[0] == 200
        assert here.closed() == {"full": 1}


async def test_an_idle_connection_is_closed_and_counted() -> None:
    async with served(Limits(connections=2, idle=0)) as here:
        client = await here.connect()
        await client.send(WHOLE)
        assert (await client.answer())[0] == 200
        assert await client.reader.read() == b""
        assert here.closed() == {"idle": 1}


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"GET / HTTP/1.1\r\n\r\n",  # without a host
        HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n",
        HEAD + b"a: " + b"b" * 70_000,
        WHOLE[:-5] + BODY[-5:] + b"nonsense\r\n\r\n",  # in a later request
    ],
)
async def test_anything_but_http_is_400(sent: bytes) -> None:
    async with served() as here:
        client = await here.connect()
        client.writer.write(sent)
        status, headers, body = await client.answer()
        if status == 200:
            status, headers, body = await client.answer()
        assert (status, headers["connection"]) == (400, "close")
        assert body["error"]["code"] == "malformed_request"
        assert await client.reader.read() == b""
        assert here.closed() == {"malformed": 1}


async def test_only_so_many_large_bodies_are_taken_in_at_a_time() -> None:
    assert spare_bytes(0) >= MAX_LARGE_BODIES * MAX_BODY_BYTES
    async with served(Limits(connections=2 * MAX_LARGE_BODIES)) as here:
        large = LARGE_BODY_BYTES + 1
        head = HEAD + b"content-length: %d\r\n\r\n" % (large + 1)
        clients = [await here.connect() for _ in range(MAX_LARGE_BODIES)]
        for client in clients:
            await client.send(head + b" " * large)
        late = await here.connect()
        late.writer.write(head + b" " * large)
        status, headers, body = await late.answer()
        assert (status, body["error"]["code"]) == (503, "large_bodies")
        assert int(headers["retry-after"]) > 0
        small = await here.connect()
        await small.send(WHOLE)
        assert (await small.answer())[0] == 200
        clients[0].writer.close()
        await until(lambda: clients[0].there not in here.open)
        whole = await here.connect()
        content = BODY + b" " * LARGE_BODY_BYTES
        await whole.send(HEAD + b"content-length: %d\r\n\r\n" % len(content) + content)
        assert (await whole.answer())[0] == 200
