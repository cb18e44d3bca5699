"""POST /generate: continue a prompt, in one piece or as a stream."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from specops.config import Settings
from specops.engine import ModelInfo, ModelState
from specops.errors import ApiError, ErrorResponse, internal_error
from specops.request import FinishReason, GenerationRequest, GenerationStats, Output
from specops.routes.state import AppState, State
from specops.schemas import Details, GenerateRequest, GenerateResponse, StreamEvent
from specops.service import NotReady, Ticket
from specops.sse import DONE, EventStream, calling_on_disconnect, event

# Encoding takes about a microsecond per character: up to here the event loop can spare it.
_LONG_PROMPT = 4096
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}},
    **{code: {"model": ErrorResponse} for code in (400, 413, 415, 422, 429, 500, 503, 504)},
}
_sequence = itertools.count(1)
log = logging.getLogger(__name__)
router = APIRouter(tags=["generate"])


@router.post("/generate", response_model=GenerateResponse, responses=_RESPONSES)
async def generate(body: GenerateRequest, request: Request, state: State) -> Response:
    """Continue a prompt.

    With `stream` the answer is a series of server-sent events: one per step with the new text and
    its tokens, then one with the fields of the plain answer, then `[DONE]`.
    """
    job = await _submit(body, request, state)
    if body.stream:
        return EventStream(_stream(job), job.ticket.cancel)
    async with calling_on_disconnect(request.receive, job.ticket.cancel):
        parts: list[str] = []
        last: Output | None = None
        async for last in job.ticket:
            parts.append(last.text)
        answer = job.answer("".join(parts), last)
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")


@dataclass(frozen=True, slots=True)
class _Job:
    """A request under way, and what its answer needs."""

    ticket: Ticket
    request: GenerationRequest
    request_id: str
    details: bool

    def answer(self, text: str, last: Output | None) -> GenerateResponse:
        """Build the answer from the whole text and the ticket's last output.

        Raises:
            ApiError: the request did not end as it should.
        """
        if last is None or last.finish is None:
            raise internal_error()
        if error := _failure(last, self.request):
            raise error
        request, stats = self.request, last.stats or GenerationStats()
        details = Details.of(stats, request)
        return GenerateResponse(
            generated_text=text,
            tokens_per_second=stats.tokens_per_second,
            avg_tokens_per_jump=stats.tokens_per_jump,
            latency_ms=(time.monotonic() - request.arrival) * 1000,
            finish_reason="stop" if last.finish is FinishReason.STOP else "length",
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            request_id=self.request_id,
            details=details if self.details else None,
        )


async def _submit(body: GenerateRequest, request: Request, state: AppState) -> _Job:
    """Check what the schema cannot, encode the prompt, queue the request.

    Raises:
        ApiError: a field's value does not suit this server.
        NotReady, QueueFull, PromptTooLong: see `Service.submit`.
    """
    service = state.service
    if service.info is None or service.state is not ModelState.READY:
        state.metrics.observe_rejected("not_ready")
        raise NotReady(service.state, service.error or f"the model is {service.state}")
    checked = _checked(body, state.settings, service.info)
    if len(body.prompt) < _LONG_PROMPT:
        tokens = service.encode(body.prompt)
    else:
        tokens = await asyncio.to_thread(service.encode, body.prompt)
    request_id: str = request.state.request_id
    arrival: float = request.state.arrival
    generation = GenerationRequest(
        # Two clients may send the same X-Request-ID; the engine tells requests apart by theirs.
        request_id=f"{request_id}/{next(_sequence)}",
        prompt_tokens=tokens,
        sampling=body.sampling,
        stop=body.stops,
        ignore_eos=body.ignore_eos,
        stream=body.stream,
        arrival=arrival,
        deadline=arrival + state.settings.request_timeout,
        **checked,
    )
    return _Job(service.submit(generation), generation, request_id, body.details)


def _checked(body: GenerateRequest, settings: Settings, info: ModelInfo) -> dict[str, Any]:
    """Fill in the server's defaults and hold the fields against its limits."""
    given = body.model_fields_set
    if body.max_new_tokens > settings.max_new_tokens and "max_new_tokens" in given:
        raise _invalid("max_new_tokens", f"at most {settings.max_new_tokens} on this server")
    adaptive = settings.adaptive if body.adaptive is None else body.adaptive
    default = settings.max_k_draft if adaptive else settings.k_draft
    k_draft = default if body.k_draft is None else body.k_draft
    if k_draft > settings.max_k_draft:
        raise _invalid("k_draft", f"at most {settings.max_k_draft} on this server")
    drafter = body.drafter or info.default_drafter
    if drafter not in info.drafters:
        names = ", ".join(info.drafters)
        raise _invalid("drafter", f"this model has {names}, not {drafter}")
    exact = settings.exact if body.exact is None else body.exact
    if exact and info.exact_align is None:
        raise _invalid("exact", "this machine's kernels round differently from pass to pass")
    return {
        "max_new_tokens": min(body.max_new_tokens, settings.max_new_tokens),
        "k_draft": k_draft if drafter != "none" else 0,
        "drafter": drafter,
        "adaptive": adaptive,
        "exact": exact,
    }


def _invalid(field: str, message: str) -> ApiError:
    return ApiError(422, f"{field}: {message}", code="invalid_value", param=field)


async def _stream(job: _Job) -> AsyncGenerator[bytes, None]:
    parts: list[str] = []
    last: Output | None = None
    async for last in job.ticket:
        if last.pieces:
            parts.append(last.text)
            yield event(StreamEvent.of(last).model_dump())
    yield event(job.answer("".join(parts), last).model_dump(exclude_none=True))
    yield DONE


def _failure(last: Output, request: GenerationRequest) -> ApiError | None:
    """Return the error that a client gets for a request that did not end by itself."""
    match last.finish:
        case FinishReason.TIMEOUT:
            seconds = request.deadline - request.arrival
            return ApiError(504, f"not finished within {seconds:g} seconds", code="timeout")
        case FinishReason.CANCELLED:  # by the client, who will not read this, or by a shutdown
            return ApiError(503, "the server is shutting down", code="draining")
        case FinishReason.ERROR:
            log.error("generation failed", extra={"fields": {"reason": last.error}})
            return internal_error()
    return None
