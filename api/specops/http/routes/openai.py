"""What OpenAI's endpoints share, and GET /v1/models."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter

from specops.engine.engine import Engine
from specops.http.answering.job import Job
from specops.http.answering.writer import Writer
from specops.http.errors import EVENTS, GENERATING, ApiError, error_responses
from specops.http.schemas.openai import (
    CompletionTokensDetails,
    Model,
    ModelList,
    PromptTokensDetails,
    Timings,
    Usage,
)
from specops.http.sse import DONE, event
from specops.http.state import Context, Ctx

ERRORS = error_responses(*GENERATING, 404)
RESPONSES = EVENTS | ERRORS
LATEST = ":latest"  # the tag that Ollama's clients write behind a name without one
_VERSION = version("specops")
router = APIRouter(tags=["openai"])


@router.get("/v1/models", responses=error_responses(401, 500, 503))
async def models(ctx: Ctx) -> ModelList:
    """List the model that is loaded."""
    name = ctx.engine.info.name
    return ModelList(data=[_model(ctx, ctx.engine)], first_id=name, last_id=name)


@router.get("/v1/models/{model:path}", responses=error_responses(401, 404, 500, 503))
async def model(model: str, ctx: Ctx) -> Model:
    """Describe the model that is loaded."""
    return _model(ctx, check_model(ctx, model))


def _model(ctx: Context, engine: Engine) -> Model:
    info, template = engine.info, engine.chat_template
    longest = info.context - 1
    return Model(
        id=info.name,
        display_name=info.name,
        created=ctx.app.started,
        created_at=datetime.fromtimestamp(ctx.app.started, UTC).isoformat(),
        max_input_tokens=longest,
        max_tokens=min(longest, ctx.settings.max_new_tokens),
        capabilities=_capabilities(thinks=bool(template and template.thinking)),
        context_length=info.context,
        max_model_len=info.context,
        quantization=info.quant,
        drafters=list(info.drafters),
        chat=info.chat,
        batch_invariant=info.batch_invariant,
        foreign_products=list(info.ort_matmuls),
        sampling=info.sampling.told,
        system=info.system,
    )


def _capabilities(*, thinks: bool) -> dict[str, Any]:
    """Return what the model can do, with every key that Anthropic's API has."""

    def supported(is_so: bool, **more: bool) -> dict[str, Any]:
        inner = {name: {"supported": value} for name, value in more.items()}
        return {"supported": is_so, **inner}

    absent = ("batch", "citations", "code_execution", "context_management", "image_input")
    types = {"disabled": True, "enabled": thinks, "adaptive": thinks, "between_tools": False}
    return {
        **{name: supported(False) for name in (*absent, "pdf_input")},
        "effort": supported(
            False, **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), False)
        ),
        "server_tools": supported(False, code_execution=False, web_search=False),
        "structured_outputs": supported(True),
        "thinking": {
            "supported": thinks,
            "types": {name: supported(value) for name, value in types.items()},
        },
    }


class OpenAiWriter(Writer):
    """Writes completions and chats, whole or in chunks.

    Args:
        prefix: of the answer's id.
        kind: the `object` of each body or chunk.
        include_usage: a last chunk has the usage, which is null in the others.

    Attributes:
        heading: the fields that every body and every chunk begins with.
    """

    def __init__(
        self, job: Job, engine: Engine, prefix: str, kind: str, *, include_usage: bool
    ) -> None:
        super().__init__(job)
        self.engine = engine
        self.heading: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": engine.info.name,
            "system_fingerprint": fingerprint(engine),
        }
        self._include_usage = include_usage

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """Return the event of a chunk; the chunk that ends the last answer has the timings."""
        data = self.heading | {"choices": [choice]}
        if self._include_usage:
            data["usage"] = None
        elif self.job.complete and choice["finish_reason"]:
            data["timings"] = timings(self.job).model_dump()
        return event(data)

    def end(self) -> bytes:
        """Return the events after all choices."""
        if not self._include_usage:
            return DONE
        figures = {
            "usage": usage(self.job).model_dump(),
            "timings": timings(self.job).model_dump(),
        }
        return event(self.heading | {"choices": []} | figures) + DONE


def fingerprint(engine: Engine) -> str:
    """Return what identifies the output: with the same fingerprint, a seed gives the same text."""
    info = engine.info
    return f"specops-{_VERSION}-{info.name}-{info.quant}-{info.threads}"


def is_called(name: str, engine: Engine) -> bool:
    """Return whether a client means this model: the case, and Ollama's `:latest`, are its own."""
    own = engine.info.name.casefold()
    return name.casefold() in (own, own + LATEST)


def check_model(ctx: Context, name: str) -> Engine:
    """Return the engine of the model that the client asks for.

    Raises:
        NotReady: see `AsyncEngine.engine`.
        ApiError: this server has another model.
    """
    engine = ctx.engine
    if not is_called(name, engine):
        raise ApiError(
            404,
            f"the model {name[:64]!r} does not exist; this server has {engine.info.name!r}",
            code="model_not_found",
            param="model",
        )
    return engine


def usage(job: Job) -> Usage:
    """Count the tokens; the choices of one prompt share its tokens."""
    prompts = job.answers[:: job.choices]
    prompt = sum(len(answer.request.prompt_tokens) for answer in prompts)
    generated = sum(answer.stats.generated_tokens for answer in job.answers)
    cached = sum(answer.stats.cached_prompt_tokens for answer in prompts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(answer.reasoning_tokens for answer in job.answers)
        ),
    )


def timings(job: Job) -> Timings:
    """Sum up the figures of the answers."""
    stats = [answer.stats for answer in job.answers]
    cached = sum(item.cached_prompt_tokens for item in stats)
    prompt = sum(item.prompt_tokens for item in stats) - cached
    prompt_seconds = sum(item.prefill_seconds for item in stats)
    decoded = sum(max(0, item.generated_tokens - 1) for item in stats)
    seconds = sum(item.decode_seconds for item in stats)
    steps = sum(item.sequence_steps for item in stats)
    return Timings(
        cache_n=cached,
        prompt_n=prompt,
        prompt_ms=round(prompt_seconds * 1000, 3),
        prompt_per_second=_per(prompt, prompt_seconds),
        predicted_n=sum(item.generated_tokens for item in stats),
        predicted_ms=round(seconds * 1000, 3),
        predicted_per_second=_per(decoded, seconds),
        draft_n=sum(item.draft_tokens for item in stats),
        draft_n_accepted=sum(item.accepted_tokens for item in stats),
        queue_ms=round(sum(item.queue_seconds for item in stats) * 1000, 3),
        steps=steps,
        tokens_per_step=_per(decoded, steps),
        drafter=job.answers[0].request.drafter,
    )


def _per(count: float, unit: float) -> float:
    return round(count / unit, 3) if unit > 0 else 0.0
