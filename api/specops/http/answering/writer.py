"""Writing answers: each protocol's `Writer` says how, in one piece or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import ClassVar

from fastapi import Response
from pydantic import BaseModel

from specops.http.answering.job import Job, Step
from specops.http.errors import ApiError
from specops.http.sse import PAUSE, EventStream


def json_answer(
    content: BaseModel, headers: Mapping[str, str], *, exclude_none: bool = False
) -> Response:
    """Return a response with a schema's JSON."""
    text = content.model_dump_json(exclude_none=exclude_none)
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
        await job.finished()
        return json_answer(self.whole(), told, exclude_none=self.exclude_none)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            async for step in self.job.steps():
                if events := self.pause if step is None else self.step(step):
                    yield events
        except ApiError as error:
            yield self.failed(error)
            return
        yield self.end()
