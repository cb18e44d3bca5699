"""An ASGI client that can leave in the middle, which httpx cannot."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message

from tests.waiting import PATIENCE


class AsgiClient:
    """One request; the test decides when the body arrives and when the client leaves."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        headers: dict[str, str] | None = None,
        *,
        method: str = "POST",
        address: str = "127.0.0.1",
    ) -> None:
        headers = {"content-type": "application/json"} | (headers or {})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": (address, 1),
            "server": ("127.0.0.1", 80),
        }
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._outgoing: asyncio.Queue[Message] = asyncio.Queue()
        self.received = 0  # body messages that the application has taken
        self.done = asyncio.ensure_future(app(scope, self._receive, self._outgoing.put))

    async def _receive(self) -> Message:
        message = await self._incoming.get()
        self.received += message["type"] == "http.request"
        return message

    def send_json(self, body: Any) -> AsgiClient:
        self.send_body(json.dumps(body).encode())
        return self

    def send_body(self, body: bytes, *, more: bool = False) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def next_message(self) -> Message:
        """The next message; fails where the application ends without one, or says nothing."""
        if not self._outgoing.empty():
            return self._outgoing.get_nowait()
        asked = asyncio.ensure_future(self._outgoing.get())
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait({asked, self.done}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            await asyncio.sleep(0)  # it may have ended with its last message
        if not asked.done():
            asked.cancel()
            await self.done
            raise AssertionError("the application has ended")
        return asked.result()

    async def next_event(self) -> Any:
        """The next server-sent event's JSON."""
        message = await self.next_message()
        if message["type"] == "http.response.start":
            message = await self.next_message()
        return json.loads(message["body"].removeprefix(b"data: ").partition(b"\n\n")[0])

    async def response(self) -> tuple[int, Any]:
        """Status and JSON body of a plain response."""
        start = await self.next_message()
        body = await self.next_message()
        return start["status"], json.loads(body["body"])

    async def rest(self) -> list[Message]:
        """The messages that were not read yet, until the application is done."""
        async with asyncio.timeout(PATIENCE):
            await self.done
        return [self._outgoing.get_nowait() for _ in range(self._outgoing.qsize())]
