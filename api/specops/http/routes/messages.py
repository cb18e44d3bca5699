"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's protocol."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Response

from specops.engine.engine import Engine
from specops.http.answering.conversation import arguments, call_id, converse, encode
from specops.http.answering.job import Job, Step
from specops.http.answering.submit import built, computed_aside
from specops.http.answering.unknown import ignore_unknown, ignored_header
from specops.http.answering.writer import Writer, json_answer
from specops.http.errors import EVENTS, GENERATING, AnthropicErrorResponse, error_responses
from specops.http.routes.openai import check_model
from specops.http.schemas.messages import (
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    StopReason,
    TokensRequest,
    TokensResponse,
)
from specops.http.sse import named_event
from specops.http.state import Ctx
from specops.text.tools.reader import Block

PATH = "/v1/messages"
_ERRORS = error_responses(*GENERATING, 404, model=AnthropicErrorResponse)
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
router = APIRouter(tags=["anthropic"])


@router.post(PATH, response_model=MessagesResponse, responses=EVENTS | _ERRORS)
async def messages(body: MessagesRequest, ctx: Ctx) -> Response:
    """Continue a conversation.

    With `stream` the answer is a series of server-sent events: `message_start`, then each block's
    `content_block_start`, `content_block_delta` and `content_block_stop`, then `message_delta` with
    the reason for the end, and `message_stop`.
    """
    engine = check_model(ctx, body.model)
    job = await converse(ctx, body, body.conversation)
    return await _Writer(job, engine, body).response(stream=body.streams)


@router.post(f"{PATH}/count_tokens", response_model=TokensResponse, responses=_ERRORS)
async def count_tokens(body: TokensRequest, ctx: Ctx) -> Response:
    """Count the tokens of a conversation's prompt."""
    engine = check_model(ctx, body.model)
    asked = await built(ctx, body.conversation)
    ignore_unknown(ctx, body, asked.skipped)
    tokens = await computed_aside(ctx, lambda: encode(engine, asked), asked.size, renders=True)
    return json_answer(TokensResponse(input_tokens=len(tokens)), ignored_header(ctx))


class _Writer(Writer):
    pause = named_event({"type": "ping"})

    def __init__(self, job: Job, engine: Engine, body: MessagesRequest) -> None:
        super().__init__(job)
        self._engine = engine
        self._limit = body.max_tokens
        (self._answer,) = job.answers
        self._open_block: int | None = None
        self._begun = False

    def whole(self) -> MessagesResponse:
        return self._message([_block(block, block.text) for block in self._answer.blocks])

    def step(self, step: Step) -> bytes:
        events = b""
        if not self._begun:
            self._begun = True
            first = self._message([]).model_dump() | {"stop_reason": None}
            events += named_event({"type": "message_start", "message": first})
        for place, text in step.deltas:
            block = self._answer.blocks[place]
            if place != self._open_block:
                events += self._stopped_block()
                self._open_block = place
                started = {"index": place, "content_block": _block(block, "")}
                events += named_event({"type": "content_block_start", **started})
            if text:
                kind, field = _DELTAS[block.kind]
                delta = {"type": kind, field: text}
                events += named_event(
                    {"type": "content_block_delta", "index": place, "delta": delta}
                )
        return events

    def end(self) -> bytes:
        last = self.whole()
        delta = {"stop_reason": last.stop_reason, "stop_sequence": last.stop_sequence}
        usage = last.usage.model_dump()
        return (
            self._stopped_block()
            + named_event({"type": "message_delta", "delta": delta, "usage": usage})
            + named_event({"type": "message_stop"})
        )

    def _stopped_block(self) -> bytes:
        if self._open_block is None:
            return b""
        return named_event({"type": "content_block_stop", "index": self._open_block})

    def _message(self, content: list[dict[str, Any]]) -> MessagesResponse:
        answer = self._answer
        cached = answer.stats.cached_prompt_tokens
        return MessagesResponse(
            id=f"msg_{uuid.uuid4().hex}",
            model=self._engine.info.name,
            content=content,
            stop_reason=self._stop_reason,
            stop_sequence=answer.last.stop if answer.last else None,
            usage=MessagesUsage(
                input_tokens=max(0, len(answer.request.prompt_tokens) - cached),
                output_tokens=answer.stats.generated_tokens,
                cache_read_input_tokens=cached,
            ),
        )

    @property
    def _stop_reason(self) -> StopReason:
        answer = self._answer
        if answer.last and answer.last.stop is not None:
            return "stop_sequence"
        reason = _REASONS[answer.chat_finish_reason]
        room = self._engine.info.context - len(answer.request.prompt_tokens)
        if reason == "max_tokens" and answer.request.max_new_tokens == room < self._limit:
            return "model_context_window_exceeded"
        return reason


def _block(block: Block, text: str) -> dict[str, Any]:
    """Return a block in Anthropic's form, with this text."""
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": call_id(), "name": block.name, "input": arguments(text)}
