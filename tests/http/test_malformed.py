"""Requests with pieces lost, doubled, exchanged or garbled: no answer is the server's fault.

`MALFORMED_CASES` is their number.
"""

import asyncio
import logging
import os
import random
import re

import h11
import pytest

from tests.http.connections import BODY, HEAD, LIMITS, WHOLE, Served, served
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio
CASES = int(os.environ.get("MALFORMED_CASES", "300"))
CHUNKED = b"transfer-encoding: chunked\r\n\r\n11\r\n" + BODY + b"\r\n0\r\n\r\n"
WHOLES = (
    *(WHOLE, HEAD + CHUNKED, HEAD + b"expect: 100-continue\r\n" + CHUNKED),
    b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\naccept: */*\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: test\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    WHOLE.replace(b'"abc"', b'"abc", "stream": true').replace(b": 17", b": 33"),
)
PIECES = (
    *(b"\r\n", b"\n", b"\0", b" ", b":", b"\xff\xfe", b"%00", b"/../", b"http://[::1", b"\r\n\r\n"),
    *(b"content-length: -1\r\n", b"content-length: 99999999999999999999\r\n", b"a" * 20_000),
    *(b"transfer-encoding: gzip\r\n", b"HTTP/9.9", b"connection: close\r\n", b"fffffffffffffffff"),
    *(b"x-request-id: \xe9\r\n", b"authorization: Bearer \xe9\r\n", b'{"prompt": "\\ud800"}'),
)


def garbled(rng: random.Random) -> bytes:
    """One request, or several, with a few things wrong."""
    content = bytearray(b"".join(rng.choices(WHOLES, k=rng.choice((1, 1, 1, 2)))))
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        start = rng.randrange(len(content) + 1)
        end = min(len(content), start + rng.choice((0, 1, 4, 30)))
        match rng.randrange(4):
            case 0:
                content[start:end] = b""
            case 1:
                content[start:end] = rng.choice(PIECES)
            case 2:
                content[start:start] = content[start:end]
            case 3:
                content[start:end] = rng.randbytes(end - start)
    return bytes(content)


async def test_no_answer_is_the_servers_fault(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(1)
    statuses: set[int] = set()
    async with served() as here:
        for _ in range(CASES):
            sent = garbled(rng)
            with caplog.at_level(logging.ERROR):
                found = await answered(here, sent)
            assert not [status for status in found if status >= 500], sent
            assert not caplog.records, sent
            statuses.update(found)
    assert {200, 400, 404, 408, 422} <= statuses


async def answered(here: Served, sent: bytes) -> list[int]:
    """The statuses of the answers to what a client sends, until nothing more can come."""
    client = await here.connect()
    client.writer.write(sent)
    received = client.there

    def ended() -> bool:
        cycle = received.cycle
        return received not in here.open or (cycle is not None and cycle.response_complete)

    await until(lambda: ended() or received._received == len(sent))
    await asyncio.sleep(0)
    if not ended() and received.conn.their_state is not h11.DONE:
        here.check_deadlines(LIMITS.body)
    await until(lambda: ended() or received._refused)
    client.writer.write_eof()
    answer = await asyncio.wait_for(client.reader.read(), PATIENCE)
    client.writer.close()
    await until(lambda: received not in here.open)
    return [int(status) for status in re.findall(rb"^HTTP/1.1 (\d+)", answer, re.MULTILINE)]
