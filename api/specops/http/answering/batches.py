"""Large batches of texts to embed: each stays bytes of the body until it is encoded.

A text with an emoji takes four bytes a character in Python, so a body of 4 MiB would become 16 MiB
of JSON, and its texts 16 MiB more. Here the JSON that is parsed has marks in place of long texts.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from specops.http.errors import InvalidField
from specops.http.security.request_body import MAX_BODY_BYTES
from specops.http.state import Context
from specops.text.json_values import in_whole_characters

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_LONG = 256  # bytes; shorter ones, and most names, stay as they are


class LateTexts:
    """The long texts of a JSON body.

    Attributes:
        rest: the body with marks in their place.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._spans: list[tuple[int, int]] = []
        mark = uuid.uuid4().hex  # which no client knows
        self._marks = re.compile(rf"{mark}(\d+);")

        def kept(found: re.Match[bytes]) -> bytes:
            if found.end() - found.start() < _LONG:
                return found[0]
            self._spans.append(found.span())
            return f'"{mark}{len(self._spans) - 1};"'.encode()

        self.rest = _STRING.sub(kept, body)

    def read(self, text: str) -> str:
        """Return a text of the body; half surrogate pairs of long ones become U+FFFD.

        Raises:
            InvalidField: it is no text.
        """
        return self._marks.sub(lambda found: self._long(int(found[1])), text)

    def _long(self, number: int) -> str:
        start, end = self._spans[number]
        try:
            text: str = in_whole_characters(json.loads(self._body[start:end]))
        except ValueError as error:
            raise InvalidField("input", f"a text cannot be read: {error}") from None
        return text


class _BatchRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= MAX_BODY_BYTES:
            return await super().json()
        texts = await asyncio.to_thread(LateTexts, body)
        Context.of(self.scope).read_text = texts.read
        return json.loads(texts.rest)


class BatchRoute(APIRoute):
    """An endpoint whose texts are read by `Context.read_text`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            return await handle(_BatchRequest(request.scope, request.receive))

        return handled
