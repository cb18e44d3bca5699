"""Sends server-sent events, also to clients that leave.

A stream's status is sent with its first event or comment. So an error before the first token still
has a status, unless a heartbeat was sent during a long wait. Starlette's `StreamingResponse` would
stop the generator when the client leaves; here its source is stopped, and the generator ends by
itself.

A gateway requests streams without chunks by the header `UNFRAMED`; they end with their connection.
A complete one ends with `END_OF_STREAM`: so the gateway can tell it from one whose server was
killed, which it ends with an error (deploy/gateway/broken_stream.lua).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specops.http.errors import ApiError
from specops.http.state import Context
from specops.text.json_values import line

DONE = b"data: [DONE]\n\n"
PAUSE = b": waiting\n\n"  # a comment: clients ignore it, proxies see that the stream lives
UNFRAMED = (b"x-specops-unframed", b"1")  # header of a request and its response
END_OF_STREAM = b"\x04"  # one byte, so no packet can cut it; no JSON contains it


def event(data: Any) -> bytes:
    """Return an event with `data` as JSON."""
    return b"data: " + line(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """Return an event whose name is the `type` of its data."""
    return f"event: {data['type']}\n".encode() + event(data)


@asynccontextmanager
async def calling_on_disconnect(receive: Receive, leave: Callable[[], None]) -> AsyncIterator[None]:
    """Call `leave` when the client leaves, or at the latest when the block ends.

    Args:
        receive: the request's channel, after its body has been read.
        leave: may be called more than once.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        leave()
        task.cancel()
        await asyncio.wait([task])


class EventStream(Response):
    """Sends events as they come.

    Args:
        events: complete events. An `ApiError` before the first one becomes the response, a later
            one the last event.
        leave: called when the client leaves, see `calling_on_disconnect`; it must end `events`.
        headers: the response's headers.
        media_type: the response's media type.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        leave: Callable[[], None],
        headers: Mapping[str, str],
        *,
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
            media_type=media_type,
        )
        del self.headers["content-length"]
        self._events = events
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or the error before the first one."""
        unframed = UNFRAMED in scope["headers"]
        headers = [*self.raw_headers, UNFRAMED] if unframed else self.raw_headers
        async with aclosing(self._events), calling_on_disconnect(receive, self._leave):
            chunk = await anext(self._events)
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": headers}
            )
            await _send_chunk(send, chunk)
            try:
                async for chunk in self._events:
                    await _send_chunk(send, chunk)
            except ApiError as error:
                await _send_chunk(send, Context.of(scope).protocol.error_event(error))
            end = END_OF_STREAM if unframed else b""
            await send({"type": "http.response.body", "body": end, "more_body": False})


async def _send_chunk(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
