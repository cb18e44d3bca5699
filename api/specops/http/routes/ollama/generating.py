"""POST /api/chat and /api/generate: what Ollama's clients ask, answered as it answers.

A stream is a line of JSON per step. Whatever model is served stays loaded.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from specops.engine.engine import Engine
from specops.http.answers import json_answer
from specops.http.choosing import fill_in
from specops.http.errors import GENERATING, OllamaErrorResponse, Responses, error_responses
from specops.http.routes.conversation import Talk, arguments, converse, said
from specops.http.routes.job import Job, Prompts, start
from specops.http.routes.openai import check_model
from specops.http.routes.unknown import ignore_unknown, ignored_header
from specops.http.schemas.ollama import (
    OllamaChat,
    OllamaChatReply,
    OllamaPrompt,
    OllamaPromptReply,
    OllamaReply,
    OllamaRequest,
)
from specops.http.sse import EventStream
from specops.http.state import AppState, State
from specops.text.tools.reader import Block

CHAT_PATH, PROMPT_PATH = "/api/chat", "/api/generate"
ERRORS = error_responses(*GENERATING, 404, model=OllamaErrorResponse)
_LINES: Responses = {200: {"content": {"application/x-ndjson": {}}}}
_LATEST = ":latest"
# The answer to nothing: clients ask so for a model to be loaded, which it is.
_LOADED: dict[str, Any] = {"done": True, "done_reason": "load"}
router = APIRouter(tags=["ollama"])

Calls = Sequence[dict[str, Any]]
Fields = Callable[[str, str, Calls], dict[str, Any]]  # a reply's, of text, thoughts and calls


def served(name: str, state: AppState) -> Engine:
    """Return the engine of the model that is asked for; `:latest` may stand behind its name.

    Raises:
        NotReady, ApiError: see `check_model`.
    """
    return check_model(name.removesuffix(_LATEST), state)


@router.post(CHAT_PATH, response_model=OllamaChatReply, responses=_LINES | ERRORS)
async def chat(body: OllamaChat, request: Request, state: State) -> Response:
    """Go on with a conversation.

    With `stream`, which is the default, the answer is a line of JSON per step, the last one with
    what it took.
    """
    engine = served(body.model, state)
    if not body.messages:
        ignore_unknown(body, request, state.settings)
        reply = OllamaChatReply(**_heading(engine), **_message("", "", ()), **_LOADED)
        return json_answer(reply, ignored_header(request), exclude_none=True)
    talk = await converse(state, request, body, body.conversation())
    return await _told(talk, body, engine, OllamaChatReply, _message)


@router.post(PROMPT_PATH, response_model=OllamaPromptReply, responses=_LINES | ERRORS)
async def generate(body: OllamaPrompt, request: Request, state: State) -> Response:
    """Answer a prompt, or, `raw` or where the model is no chat model, go on with it."""
    engine = served(body.model, state)
    if not (body.prompt or body.suffix):
        ignore_unknown(body, request, state.settings)
        reply = OllamaPromptReply(**_heading(engine), response="", **_LOADED)
        return json_answer(reply, ignored_header(request), exclude_none=True)
    if not (body.raw or body.suffix) and (engine.info.chat or body.system):
        talk = await converse(state, request, body, body.conversation())
        return await _told(talk, body, engine, OllamaPromptReply, _response)
    job = await _continued(body, request, state, engine)
    if body.stream is not False:
        return _stream(job, engine, _texts(job), _response, list)
    (answer,) = await job.finished()
    told = _heading(engine) | _response(answer.text, "", ()) | _ending(job)
    return json_answer(OllamaPromptReply(**told), job.headers, exclude_none=True)


async def _continued(body: OllamaPrompt, request: Request, state: AppState, engine: Engine) -> Job:
    gap = fill_in(body.suffix, engine)
    most = state.settings.max_new_tokens
    return await start(
        state,
        request,
        body,
        Prompts(
            lambda engine: [
                gap.prompt(body.prompt, body.suffix or "") if gap else engine.encode(body.prompt)
            ],
            1,
            len(body.prompt) + len(body.suffix or ""),
            body.prompt,
        ),
        sampling=lambda _: body.sampling,
        max_new_tokens=min(body.limit or most, most),
        stop=(*body.stops, *(gap.ends if gap else ())),
        stop_token_ids=(*(body.stop_token_ids or ()), *(gap.ends.values() if gap else ())),
        stream=body.stream is not False,
    )


async def _told(
    talk: Talk, body: OllamaRequest, engine: Engine, kind: type[OllamaReply], fields: Fields
) -> Response:
    """The answer of a chat model."""
    if body.stream is not False:
        return _stream(talk.job, engine, _spoken(talk), fields, lambda: _calls(talk.blocks(0)))
    (blocks,) = await talk.finished()
    text, thoughts = said(blocks, "text"), said(blocks, "reasoning")
    reply = _heading(engine) | fields(text, thoughts, _calls(blocks)) | _ending(talk.job)
    return json_answer(kind(**reply), talk.job.headers, exclude_none=True)


async def _spoken(talk: Talk) -> AsyncIterator[tuple[str, str]]:
    """What each step brought: text and thoughts."""
    async for step in talk.steps():
        if step is None:
            continue
        kinds = [block.kind for block in talk.blocks(0)]
        text, thoughts = (
            "".join(text for place, text in step.deltas if kinds[place] == which)
            for which in ("text", "reasoning")
        )
        yield text, thoughts


async def _texts(job: Job) -> AsyncIterator[tuple[str, str]]:
    async for item in job.outputs():
        if item is not None:
            yield item[1].text, ""


def _stream(
    job: Job,
    engine: Engine,
    parts: AsyncIterator[tuple[str, str]],
    fields: Fields,
    calls: Callable[[], Calls],
) -> Response:
    async def lines() -> AsyncGenerator[bytes, None]:
        async for text, thoughts in parts:
            if text or thoughts:
                yield _line(_heading(engine), fields(text, thoughts, ()), {"done": False})
        if called := calls():
            yield _line(_heading(engine), fields("", "", called), {"done": False})
        yield _line(_heading(engine), fields("", "", ()), _ending(job))

    return EventStream(lines(), job.handle.cancel, job.headers, media_type="application/x-ndjson")


def _line(*parts: dict[str, Any]) -> bytes:
    told: dict[str, Any] = {}
    for part in parts:
        told |= part
    return orjson.dumps(told) + b"\n"


def _heading(engine: Engine) -> dict[str, Any]:
    return {"model": engine.info.name, "created_at": datetime.now(UTC).isoformat()}


def _message(text: str, thoughts: str, calls: Calls) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        told["thinking"] = thoughts
    if calls:
        told["tool_calls"] = calls
    return {"message": told}


def _response(text: str, thoughts: str, calls: Calls) -> dict[str, Any]:
    del calls  # there are no tools
    return {"response": text} | ({"thinking": thoughts} if thoughts else {})


def _calls(blocks: Sequence[Block]) -> Calls:
    return [
        {"function": {"name": block.name, "arguments": arguments(block.text)}}
        for block in blocks
        if block.kind == "call"
    ]


def _ending(job: Job) -> dict[str, Any]:
    """What it took; a client divides by the durations, so none is 0."""
    (answer,) = job.answers
    stats = answer.stats
    return {
        "done": True,
        "done_reason": answer.finish_reason,
        "total_duration": nanoseconds(time.monotonic() - job.arrival),
        "load_duration": 0,
        "prompt_eval_count": len(answer.request.prompt_tokens),
        "prompt_eval_duration": nanoseconds(stats.prefill_seconds),
        "eval_count": stats.generated_tokens,
        "eval_duration": nanoseconds(stats.decode_seconds),
    }


def nanoseconds(seconds: float) -> int:
    """A duration as Ollama tells it."""
    return max(1, round(seconds * 1e9))
