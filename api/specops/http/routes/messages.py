"""POST /v1/messages: the assistant's next turn, as Anthropic has it, and how long its prompt is."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from specops.http.answers import json_answer
from specops.http.errors import EVENTS, GENERATING, AnthropicErrorResponse, error_responses
from specops.http.routes.conversation import Talk, arguments, call_id, converse, encode
from specops.http.routes.job import computed
from specops.http.routes.openai import check_model
from specops.http.routes.unknown import ignore_unknown, ignored_header
from specops.http.schemas.messages import (
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TokensRequest,
    TokensResponse,
)
from specops.http.sse import PAUSE, EventStream, named_event
from specops.http.state import State
from specops.text.tools.reader import Block

PATH = "/v1/messages"
_ERRORS = error_responses(*GENERATING, 404, model=AnthropicErrorResponse)
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
router = APIRouter(tags=["anthropic"])


@router.post(PATH, response_model=MessagesResponse, responses=EVENTS | _ERRORS)
async def messages(body: MessagesRequest, request: Request, state: State) -> Response:
    """Go on with a conversation.

    With `stream` the answer is a series of server-sent events: `message_start`, then each block's
    `content_block_start`, `content_block_delta` and `content_block_stop`, then `message_delta` with
    the reason for the end, and `message_stop`.
    """
    check_model(body.model, state)
    talk = await converse(state, request, body, body.conversation())
    headers = talk.job.headers | {"request-id": talk.job.request_id}
    if body.stream:
        return EventStream(_stream(talk), talk.job.handle.cancel, headers)
    (blocks,) = await talk.finished()
    content = _message(talk, [_block(block, block.text) for block in blocks])
    return json_answer(content, headers)


@router.post(f"{PATH}/count_tokens", response_model=TokensResponse, responses=_ERRORS)
async def count_tokens(body: TokensRequest, request: Request, state: State) -> Response:
    """Tell how many tokens the prompt of a conversation has."""
    engine = check_model(body.model, state)
    conversation = body.conversation()
    ignore_unknown(body, request, state.settings, conversation.skipped)
    tokens = await computed(
        lambda: encode(engine, conversation), conversation.size, state.settings, renders=True
    )
    return json_answer(TokensResponse(input_tokens=len(tokens)), ignored_header(request))


def _message(talk: Talk, content: list[dict[str, Any]]) -> MessagesResponse:
    reason, stop = _stop(talk)
    return MessagesResponse(
        id=f"msg_{uuid.uuid4().hex}",
        model=talk.engine.info.name,
        content=content,
        stop_reason=reason,
        stop_sequence=stop,
        usage=_usage(talk),
    )


def _stop(
    talk: Talk,
) -> tuple[Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"], str | None]:
    last = talk.job.answers[0].last
    if last is not None and last.stop is not None:
        return "stop_sequence", last.stop
    match talk.finish_reason(0):
        case "length":
            return "max_tokens", None
        case "tool_calls":
            return "tool_use", None
    return "end_turn", None


def _usage(talk: Talk) -> MessagesUsage:
    (answer,) = talk.job.answers
    cached = answer.stats.cached_prompt_tokens
    return MessagesUsage(
        input_tokens=max(0, len(answer.request.prompt_tokens) - cached),
        output_tokens=answer.stats.generated_tokens,
        cache_read_input_tokens=cached,
    )


def _block(block: Block, text: str) -> dict[str, Any]:
    """A block as Anthropic has it, with so much of its text."""
    match block.kind:
        case "text":
            return {"type": "text", "text": text, "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": call_id(), "name": block.name, "input": arguments(text)}


async def _stream(talk: Talk) -> AsyncGenerator[bytes, None]:
    open_block: int | None = None
    begun = False
    async for step in talk.steps():
        if step is None:
            yield PAUSE
            continue
        if not begun:
            begun = True
            first = _message(talk, []).model_dump() | {"stop_reason": None}
            yield named_event({"type": "message_start", "message": first})
        for place, text in step.deltas:
            block = talk.blocks(0)[place]
            if place != open_block:
                if open_block is not None:
                    yield named_event({"type": "content_block_stop", "index": open_block})
                open_block = place
                started = {"index": place, "content_block": _block(block, "")}
                yield named_event({"type": "content_block_start", **started})
            if text:
                kind, field = _DELTAS[block.kind]
                delta = {"type": kind, field: text}
                yield named_event({"type": "content_block_delta", "index": place, "delta": delta})
    if open_block is not None:
        yield named_event({"type": "content_block_stop", "index": open_block})
    reason, stop = _stop(talk)
    yield named_event(
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": _usage(talk).model_dump(),
        }
    )
    yield named_event({"type": "message_stop"})
