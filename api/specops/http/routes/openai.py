"""What the endpoints that OpenAI's clients call have in common."""

from __future__ import annotations

import time
import uuid
from importlib.metadata import version
from typing import Any

from specops.engine.engine import Engine
from specops.http.errors import EVENTS, GENERATING, ApiError, error_responses
from specops.http.routes.job import Job
from specops.http.schemas.openai import PromptTokensDetails, Timings, Usage
from specops.http.sse import DONE, event
from specops.http.state import AppState

ERRORS = error_responses(*GENERATING, 404)
RESPONSES = EVENTS | ERRORS
_VERSION = version("specops")


class Heading:
    """What every answer and every chunk of one request begins with.

    Args:
        include_usage: one more chunk tells the usage, which is null in the others.
    """

    def __init__(self, prefix: str, kind: str, engine: Engine, *, include_usage: bool) -> None:
        self.fields: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": engine.info.name,
            "system_fingerprint": fingerprint(engine),
        }
        self._include_usage = include_usage

    def chunk(self, job: Job, choice: dict[str, Any]) -> bytes:
        """Return the event of a chunk; the one that ends the last answer tells what they took."""
        data = self.fields | {"choices": [choice]}
        if self._include_usage:
            data["usage"] = None
        elif job.complete and choice["finish_reason"]:
            data["timings"] = timings(job).model_dump()
        return event(data)

    def end(self, job: Job) -> bytes:
        """Return the events after all choices."""
        if not self._include_usage:
            return DONE
        told = {"usage": usage(job).model_dump(), "timings": timings(job).model_dump()}
        return event(self.fields | {"choices": []} | told) + DONE


def fingerprint(engine: Engine) -> str:
    """What answers: with the same, a seed gives the same output."""
    info = engine.info
    return f"specops-{_VERSION}-{info.name}-{info.quant}-{info.threads}"


def check_model(name: str, state: AppState) -> Engine:
    """Return the engine of the model that is asked for.

    Raises:
        NotReady: see `AsyncEngine.engine`.
        ApiError: it is another model.
    """
    engine = state.service.engine
    if name != engine.info.name:
        raise ApiError(
            404,
            f"the model {name!r} does not exist; this server has {engine.info.name!r}",
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
    )


def timings(job: Job) -> Timings:
    """Sum up what the answers took."""
    return Timings.of((answer.stats for answer in job.answers), job.answers[0].request.drafter)
