"""POST /generate: continue or answer a prompt, in one piece or as a stream."""

from __future__ import annotations

import time

from fastapi import APIRouter, Response

from specops.engine.engine import Engine
from specops.http.answering.conversation import encode
from specops.http.answering.job import Job, Step
from specops.http.answering.submit import Tokens, start
from specops.http.answering.writer import Writer
from specops.http.errors import EVENTS, GENERATING, error_responses
from specops.http.schemas.conversation import Conversation
from specops.http.schemas.generate import Details, GenerateRequest, GenerateResponse, stream_event
from specops.http.sse import DONE, event
from specops.http.state import Ctx
from specops.text.chat_template import question

_RESPONSES = EVENTS | error_responses(*GENERATING, 422)
PATH = "/generate"
router = APIRouter(tags=["generate"])


@router.post(PATH, response_model=GenerateResponse, responses=_RESPONSES)
async def generate(body: GenerateRequest, ctx: Ctx) -> Response:
    """Continue a prompt, or, with `system`, answer it.

    With `stream` the answer is a series of server-sent events: one per step with the new text and
    its tokens, then one with the fields of the plain answer, then `[DONE]`.
    """
    engine = ctx.engine
    job = await start(
        ctx,
        body,
        lambda: [_encode(body, engine)],
        size=len(body.prompt) + len(body.system or ""),
        shown=body.prompt,
        rendered=body.system is not None,
    )
    return await _Writer(job, details=body.details).response(stream=body.streams)


def _encode(body: GenerateRequest, engine: Engine) -> Tokens:
    if body.system is None:
        return engine.encode(body.prompt)
    asked = Conversation(messages=question(body.prompt, body.system), source="system")
    return encode(engine, asked)


class _Writer(Writer):
    exclude_none = True

    def __init__(self, job: Job, *, details: bool) -> None:
        super().__init__(job)
        self._details = details

    def whole(self) -> GenerateResponse:
        (answer,) = self.job.answers
        request, stats = answer.request, answer.stats
        return GenerateResponse(
            generated_text=answer.text,
            tokens_per_second=stats.tokens_per_second,
            avg_tokens_per_jump=stats.tokens_per_jump,
            latency_ms=(time.monotonic() - self.job.arrival) * 1000,
            finish_reason=answer.finish_reason,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            request_id=self.job.request_id,
            details=Details.of(stats, request) if self._details else None,
        )

    def step(self, step: Step) -> bytes:
        return event(stream_event(step.output)) if step.output.pieces else b""

    def end(self) -> bytes:
        return event(self.whole().model_dump(exclude_none=True)) + DONE
