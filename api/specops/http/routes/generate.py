"""POST /generate: continue or answer a prompt, in one piece or as a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response

from specops.engine.engine import Engine
from specops.http.answers import json_answer
from specops.http.errors import EVENTS, GENERATING, error_responses
from specops.http.routes.conversation import encode
from specops.http.routes.job import Answer, Job, Prompts, Tokens, output_limit, start
from specops.http.schemas.conversation import Conversation
from specops.http.schemas.generate import Details, GenerateRequest, GenerateResponse, stream_event
from specops.http.sse import DONE, PAUSE, EventStream, event
from specops.http.state import State
from specops.text.chat_template import question

_RESPONSES = EVENTS | error_responses(*GENERATING, 422)
PATH = "/generate"
router = APIRouter(tags=["generate"])


@router.post(PATH, response_model=GenerateResponse, responses=_RESPONSES)
async def generate(body: GenerateRequest, request: Request, state: State) -> Response:
    """Continue a prompt, or, with `system`, answer it.

    With `stream` the answer is a series of server-sent events: one per step with the new text and
    its tokens, then one with the fields of the plain answer, then `[DONE]`.
    """
    wanted = body.max_new_tokens if "max_new_tokens" in body.model_fields_set else None
    job = await start(
        state,
        request,
        body,
        Prompts(
            lambda engine: [_encode(body, engine)],
            1,
            len(body.prompt) + len(body.system or ""),
            body.prompt,
            rendered=body.system is not None,
        ),
        sampling=lambda _: body.sampling,
        max_new_tokens=output_limit(
            wanted, "max_new_tokens", state.settings, default=body.max_new_tokens
        ),
        stop=body.stops,
        stream=body.stream,
    )
    if body.stream:
        return EventStream(_stream(job, body.details), job.handle.cancel, job.headers)
    (answer,) = await job.finished()
    return json_answer(_response(job, answer, body.details), job.headers, exclude_none=True)


def _encode(body: GenerateRequest, engine: Engine) -> Tokens:
    if body.system is None:
        return engine.encode(body.prompt)
    asked = Conversation(messages=question(body.prompt, body.system), source="system")
    return encode(engine, asked)


def _response(job: Job, answer: Answer, details: bool) -> GenerateResponse:
    request, stats = answer.request, answer.stats
    return GenerateResponse(
        generated_text=answer.text,
        tokens_per_second=stats.tokens_per_second,
        avg_tokens_per_jump=stats.tokens_per_jump,
        latency_ms=(time.monotonic() - job.arrival) * 1000,
        finish_reason=answer.finish_reason,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        request_id=job.request_id,
        details=Details.of(stats, request) if details else None,
    )


async def _stream(job: Job, details: bool) -> AsyncGenerator[bytes, None]:
    async for item in job.outputs():
        if item is None:
            yield PAUSE
        elif item[1].pieces:
            yield event(stream_event(item[1]))
    yield event(_response(job, job.answers[0], details).model_dump(exclude_none=True))
    yield DONE
