"""POST /v1/responses: the assistant's next turn, in OpenAI's newer protocol. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Response

from specops.engine.engine import Engine
from specops.http.answering.conversation import call_id, converse
from specops.http.answering.job import Job, Step
from specops.http.answering.writer import Writer
from specops.http.errors import ApiError
from specops.http.routes.openai import RESPONSES, check_model
from specops.http.schemas.body import known_fields
from specops.http.schemas.responses import Response as ResponseBody
from specops.http.schemas.responses import ResponsesRequest, ResponsesUsage
from specops.http.sse import named_event
from specops.http.state import Ctx
from specops.text.tools.reader import Block

PATH = "/v1/responses"
_STEMS = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
router = APIRouter(tags=["openai"])


@router.post(PATH, response_model=ResponseBody, responses=RESPONSES)
async def responses(body: ResponsesRequest, ctx: Ctx) -> Response:
    """Continue a conversation; the request has all of it.

    With `stream` the answer is a series of server-sent events, from `response.created` to
    `response.completed`, `response.incomplete` or `response.failed`.
    """
    engine = check_model(ctx, body.model)
    recalled = ctx.app.items.get(ctx.client, body.references)
    more = sum(map(len, recalled.values()))
    job = await converse(ctx, body, lambda: body.conversation(recalled), recalled_bytes=more)
    keep = partial(ctx.app.items.keep, ctx.client) if body.store is not False else None
    return await _Writer(job, engine, body, keep).response(stream=body.streams)


class _Writer(Writer):
    def __init__(
        self,
        job: Job,
        engine: Engine,
        body: ResponsesRequest,
        keep: Callable[[list[dict[str, Any]]], None] | None,
    ) -> None:
        super().__init__(job)
        self._model = engine.info.name
        self._body = body
        self._keep = keep
        (self._answer,) = job.answers
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []  # one per block: the fields that never change
        self._open: int | None = None  # place of the item that is being written
        self._sent = 0

    def whole(self, error: ApiError | None = None) -> ResponseBody:
        body, answer = self._body, self._answer
        complete = answer.last is not None and error is None
        cut = complete and answer.finish_reason == "length"
        blocks = answer.blocks
        output = [self._item(place) for place in range(len(blocks))]
        for item, block in zip(output, blocks, strict=True):
            whole = complete and not (cut and block is blocks[-1])
            item["status"] = "completed" if whole else "incomplete"
        if complete and self._keep is not None:
            self._keep(output)
        form = body.text and body.text.format
        status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
        if error:
            status = "failed"
        elif complete:
            status = "incomplete" if cut else "completed"
        return ResponseBody(
            id=self._id,
            created_at=self._created,
            completed_at=int(time.time()) if complete else None,
            status=status,
            error={"code": "server_error", "message": error.detail} if error else None,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=self._model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            prompt_cache_key=body.prompt_cache_key,
            reasoning={"effort": body.effort, "summary": None},
            safety_identifier=body.safety_identifier,
            temperature=answer.request.sampling.temperature,
            text={"format": known_fields(form) if form else {"type": "text"}},
            tool_choice=_choice(body),
            tools=[tool.told() for tool in body.tools or ()],
            top_p=answer.request.sampling.top_p,
            usage=self._usage() if complete else None,
            user=body.user,
        )

    def step(self, step: Step) -> bytes:
        events = b""
        if not self._sent:
            begun = self.whole().model_dump()
            begun |= {"status": "in_progress", "output": [], "usage": None}
            events += self._event("response.created", response=begun)
            events += self._event("response.in_progress", response=begun)
        for place, text in step.deltas:
            if place != self._open:
                events += self._closed() + self._opened(place)
            if text:
                events += self._written("delta", place, delta=text)
        return events

    def end(self) -> bytes:
        done = self.whole().model_dump()
        return self._closed(done["status"]) + self._event(
            f"response.{done['status']}", response=done
        )

    def failed(self, error: ApiError) -> bytes:
        if not self._sent:
            raise error
        return self._event("response.failed", response=self.whole(error).model_dump())

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return named_event({"type": kind, "sequence_number": self._sent - 1, **fields})

    def _opened(self, place: int) -> bytes:
        """Return the events that begin an item."""
        self._open = place
        block = self._answer.blocks[place]
        item = self._item(place) | {"status": "in_progress"}
        item["arguments" if block.kind == "call" else "content"] = (
            "" if block.kind == "call" else []
        )
        events = self._event("response.output_item.added", output_index=place, item=item)
        if block.kind == "call":
            return events
        return events + self._part("added", place, "")

    def _closed(self, status: str = "completed") -> bytes:
        """Return the events that end the item that is being written, with its status."""
        if (place := self._open) is None:
            return b""
        block = self._answer.blocks[place]
        if block.kind == "call":
            events = self._written("done", place, arguments=block.text, name=block.name)
        else:
            events = self._written("done", place, text=block.text)
            events += self._part("done", place, block.text)
        item = self._item(place) | {"status": status}
        return events + self._event("response.output_item.done", output_index=place, item=item)

    def _part(self, what: str, place: int, text: str) -> bytes:
        """Return the event of an item's only part."""
        part = _part(self._answer.blocks[place], text)
        where = {"item_id": self._item(place)["id"], "output_index": place, "content_index": 0}
        return self._event(f"response.content_part.{what}", part=part, **where)

    def _written(self, what: str, place: int, **fields: str) -> bytes:
        """Return the event of an item's text, or of a call's arguments."""
        block = self._answer.blocks[place]
        where: dict[str, Any] = {"item_id": self._item(place)["id"], "output_index": place}
        if block.kind != "call":
            where["content_index"] = 0
        if block.kind == "text":
            where["logprobs"] = []
        return self._event(f"response.{_STEMS[block.kind]}.{what}", **fields, **where)

    def _item(self, place: int) -> dict[str, Any]:
        """Return an item of the output, as far as it has come."""
        blocks = self._answer.blocks
        for block in blocks[len(self._items) :]:
            self._items.append(_fixed(block))
        block = blocks[place]
        if block.kind == "call":
            return self._items[place] | {"arguments": block.text}
        return self._items[place] | {"content": [_part(block, block.text)]}

    def _usage(self) -> ResponsesUsage:
        answer = self._answer
        prompt, generated = len(answer.request.prompt_tokens), answer.stats.generated_tokens
        return ResponsesUsage(
            input_tokens=prompt,
            input_tokens_details={
                "cached_tokens": answer.stats.cached_prompt_tokens,
                "cache_write_tokens": 0,  # a service that counts them charges for them
            },
            output_tokens=generated,
            output_tokens_details={"reasoning_tokens": answer.reasoning_tokens},
            total_tokens=prompt + generated,
        )


def _fixed(block: Block) -> dict[str, Any]:
    """Return the fields of an item that do not change while it is written."""
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
    return choice if isinstance(choice, str) else choice.model_dump()
