"""POST /v1/responses: the assistant's next turn, as OpenAI's newer protocol has it. Stateless."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from specops.http.answers import json_answer
from specops.http.errors import ApiError
from specops.http.routes.conversation import Talk, call_id, converse
from specops.http.routes.openai import RESPONSES, check_model
from specops.http.schemas.responses import Response as ResponseBody
from specops.http.schemas.responses import ResponsesRequest, ResponsesUsage
from specops.http.sse import PAUSE, EventStream, named_event
from specops.http.state import State
from specops.text.tools.reader import Block

PATH = "/v1/responses"
_STEMS = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
router = APIRouter(tags=["openai"])


@router.post(PATH, response_model=ResponseBody, responses=RESPONSES)
async def responses(body: ResponsesRequest, request: Request, state: State) -> Response:
    """Go on with a conversation that the request brings whole.

    With `stream` the answer is a series of server-sent events, from `response.created` to
    `response.completed`, `response.incomplete` or `response.failed`.
    """
    check_model(body.model, state)
    talk = await converse(state, request, body, body.conversation())
    answer = _Answer(talk, body)
    if body.stream:
        return EventStream(answer.stream(), talk.job.handle.cancel, talk.job.headers)
    await talk.finished()
    return json_answer(answer.response(), talk.job.headers)


class _Answer:
    """One answer, in one piece or as events."""

    def __init__(self, talk: Talk, body: ResponsesRequest) -> None:
        self._talk = talk
        self._body = body
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []  # one per block: what of it does not change
        self._events = 0

    def response(self, error: ApiError | None = None) -> ResponseBody:
        """The answer as it stands."""
        body, answer = self._body, self._talk.job.answers[0]
        complete = answer.last is not None and error is None
        cut = complete and answer.finish_reason == "length"
        blocks = self._talk.blocks(0)
        output = [self._item(place) for place in range(len(blocks))]
        for item, block in zip(output, blocks, strict=True):
            whole = complete and not (cut and block is blocks[-1])
            item["status"] = "completed" if whole else "incomplete"
        status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
        if error:
            status = "failed"
        elif complete:
            status = "incomplete" if cut else "completed"
        return ResponseBody(
            id=self._id,
            created_at=self._created,
            status=status,
            error={"code": "server_error", "message": error.detail} if error else None,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self._talk.engine.info.name,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=1.0 if body.temperature is None else body.temperature,
            text=body.text.model_dump(by_alias=True) if body.text else {"format": {"type": "text"}},
            tool_choice=_choice(body),
            tools=[tool.model_dump() for tool in body.tools or ()],
            top_p=1.0 if body.top_p is None else body.top_p,
            usage=self._usage() if complete else None,
        )

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events."""
        last: int | None = None  # the item that is being written
        try:
            async for step in self._talk.steps():
                if step is None:
                    yield PAUSE
                    continue
                if not self._events:
                    told = self._snapshot() | {"status": "in_progress", "output": [], "usage": None}
                    yield self._event("response.created", response=told)
                    yield self._event("response.in_progress", response=told)
                for place, text in step.deltas:
                    if place != last:
                        yield self._closed(last) + self._opened(place)
                        last = place
                    if text:
                        yield self._written("delta", place, delta=text)
        except ApiError as error:
            if not self._events:
                raise
            yield self._event("response.failed", response=self.response(error).model_dump())
            return
        yield self._closed(last)
        done = self._snapshot()
        yield self._event(f"response.{done['status']}", response=done)

    def _snapshot(self) -> dict[str, Any]:
        return self.response().model_dump()

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._events += 1
        return named_event({"type": kind, "sequence_number": self._events - 1, **fields})

    def _opened(self, place: int) -> bytes:
        """The events that begin an item."""
        block = self._talk.blocks(0)[place]
        item = self._item(place) | {"status": "in_progress"}
        item["arguments" if block.kind == "call" else "content"] = (
            "" if block.kind == "call" else []
        )
        events = self._event("response.output_item.added", output_index=place, item=item)
        if block.kind == "call":
            return events
        return events + self._part("added", place, "")

    def _closed(self, place: int | None) -> bytes:
        """The events that end an item."""
        if place is None:
            return b""
        block = self._talk.blocks(0)[place]
        if block.kind == "call":
            events = self._written("done", place, arguments=block.text, name=block.name)
        else:
            events = self._written("done", place, text=block.text)
            events += self._part("done", place, block.text)
        item = self._item(place) | {"status": "completed"}
        return events + self._event("response.output_item.done", output_index=place, item=item)

    def _part(self, what: str, place: int, text: str) -> bytes:
        """The event of an item's only part."""
        part = _part(self._talk.blocks(0)[place], text)
        where = {"item_id": self._item(place)["id"], "output_index": place, "content_index": 0}
        return self._event(f"response.content_part.{what}", part=part, **where)

    def _written(self, what: str, place: int, **fields: str) -> bytes:
        """The event of what an item consists of: text, or a call's arguments."""
        block = self._talk.blocks(0)[place]
        where: dict[str, Any] = {"item_id": self._item(place)["id"], "output_index": place}
        if block.kind != "call":
            where["content_index"] = 0
        if block.kind == "text":
            where["logprobs"] = []
        return self._event(f"response.{_STEMS[block.kind]}.{what}", **fields, **where)

    def _item(self, place: int) -> dict[str, Any]:
        """An item of the output with what has come of it."""
        blocks = self._talk.blocks(0)
        for block in blocks[len(self._items) :]:
            self._items.append(_fixed(block))
        block = blocks[place]
        if block.kind == "call":
            return self._items[place] | {"arguments": block.text}
        return self._items[place] | {"content": [_part(block, block.text)]}

    def _usage(self) -> ResponsesUsage:
        (answer,) = self._talk.job.answers
        prompt, generated = len(answer.request.prompt_tokens), answer.stats.generated_tokens
        blocks = self._talk.blocks(0)
        thought = sum(len(block.text) for block in blocks if block.kind == "reasoning")
        whole = sum(len(block.text) for block in blocks)
        return ResponsesUsage(
            input_tokens=prompt,
            input_tokens_details={"cached_tokens": answer.stats.cached_prompt_tokens},
            output_tokens=generated,
            output_tokens_details={"reasoning_tokens": generated * thought // max(1, whole)},
            total_tokens=prompt + generated,
        )


def _fixed(block: Block) -> dict[str, Any]:
    """What of an item does not change while it is written."""
    key = uuid.uuid4().hex
    match block.kind:
        case "text":
            return {"id": f"msg_{key}", "type": "message", "role": "assistant"}
        case "reasoning":
            return {"id": f"rs_{key}", "type": "reasoning", "summary": []}
    return {"id": f"fc_{key}", "type": "function_call", "call_id": call_id(), "name": block.name}


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else {"type": "function", "name": choice.name}
