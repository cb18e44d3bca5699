"""Writing answers: each protocol's `Writer` says how, in one piece or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, TypeVar

from fastapi import Response
from pydantic import BaseModel

from specops.http.answering.job import Job, Step
from specops.http.errors import ApiError
from specops.http.sse import PAUSE, EventStream

# One thread: an answer of thousands of tokens with 20 likely ones beside each takes a second.
_WRITER = ThreadPoolExecutor(1, "write")
_LONG = 1024  # tokens and likely tokens: the event loop writes so many in about 4 ms
_T = TypeVar("_T")


async def long_write(work: Callable[[], _T], tokens: int) -> _T:
    """Write an answer, on a thread if it is long.

    Args:
        work: writes it.
        tokens: number of tokens that it tells of.
    """
    if tokens < _LONG:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_WRITER, work)


def json_of(content: BaseModel, *, exclude_none: bool = False) -> bytes:
    """Return a schema's JSON, made in pieces where it has lists of schemas.

    pydantic holds the interpreter until it has written all that it is given, and so would the
    choices of one request, with the probabilities of all their tokens.
    """
    lists = {name: value for name, value in content if _is_list_of_schemas(value)}
    rest = content.model_dump_json(exclude_none=exclude_none, exclude=set(lists))
    fields = [rest[1:-1]] if rest != "{}" else []
    for name, items in lists.items():
        texts = [item.model_dump_json(exclude_none=exclude_none) for item in items]
        fields.append(f'"{name}":[{",".join(texts)}]')
    return f"{{{','.join(fields)}}}".encode()


def _is_list_of_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], BaseModel)


def json_answer(
    content: BaseModel, headers: Mapping[str, str], *, exclude_none: bool = False
) -> Response:
    """Return a response with a schema's JSON."""
    text = json_of(content, exclude_none=exclude_none)
    return Response(text, headers=dict(headers), media_type="application/json")


class Writer:
    """Writes a job's answers in the words of one protocol.

    Attributes:
        media_type: of a stream.
        pause: sent after a long silence in a stream, as a sign of life.
        exclude_none: leave fields without a value out of an answer in one piece.
    """

    media_type: ClassVar[str] = "text/event-stream"
    pause: ClassVar[bytes] = PAUSE
    exclude_none: ClassVar[bool] = False

    def __init__(self, job: Job) -> None:
        self.job = job

    def whole(self) -> BaseModel:
        """Return the body of an answer in one piece, once the job is finished."""
        raise NotImplementedError

    def step(self, step: Step) -> bytes:
        """Return the events of one step; none where the step brought nothing to show."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Return the events that end a stream."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> bytes:
        """Return the events that end a stream after a failure, or raise the error.

        A raised error becomes the response, or the stream's last event if the stream has begun.
        """
        raise error

    async def response(self, *, stream: bool, headers: Mapping[str, str] | None = None) -> Response:
        """Send the answers.

        Args:
            stream: send events as they come; otherwise one body at the end.
            headers: more headers.

        Raises:
            ApiError: an answer in one piece failed.
        """
        job, told = self.job, self.job.headers | dict(headers or {})
        if stream:
            events = self._events()
            return EventStream(events, job.handle.cancel, told, media_type=self.media_type)
        tokens = sum(answer.told_tokens for answer in await job.finished())
        return await long_write(
            lambda: json_answer(self.whole(), told, exclude_none=self.exclude_none), tokens
        )

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            async for step in self.job.steps():
                if step is None:
                    events = self.pause
                else:
                    events = await long_write(partial(self.step, step), step.output.told_tokens)
                if events:
                    yield events
        except ApiError as error:
            yield self.failed(error)
            return
        yield self.end()
