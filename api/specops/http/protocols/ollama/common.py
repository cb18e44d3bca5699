"""Shared by Ollama's endpoints: parsing of bodies, the model's name, errors.

Bodies are parsed as Go's JSON package does for Ollama: field names ignore case, and half a
surrogate pair becomes U+FFFD.
"""

from datetime import datetime
from typing import Any, Literal

from fastapi import Response
from pydantic import BaseModel, Field, model_validator

from specops.engine.engine import Engine
from specops.http.answering.schema import Body, Text, answer_headers, ignore_unknown
from specops.http.answering.submit import check_model
from specops.http.answering.writer import json_answer
from specops.http.errors import GENERATING, ApiError, Responses, error_responses
from specops.http.state import Context
from specops.text.json_values import in_whole_characters


class OllamaErrorResponse(BaseModel):
    """The body of every failed response below `/api/`."""

    error: str


LINES = "application/x-ndjson"  # a line of JSON per step
ERRORS = error_responses(*GENERATING, 404, model=OllamaErrorResponse)
_STREAM: Responses = {200: {"content": {LINES: {}}}}
RESPONSES = _STREAM | ERRORS
MACHINE_OPTIONS = frozenset(
    {
        *("num_ctx", "num_batch", "num_keep", "num_gpu", "main_gpu", "num_thread", "num_gqa"),
        *("low_vram", "numa", "use_mmap", "use_mlock", "f16_kv", "vocab_only", "logits_all"),
        *("embedding_only", "rope_frequency_base", "rope_frequency_scale", "draft_num_predict"),
        *("repeat_last_n", "penalize_newline", "shift"),
    }
)


class OllamaBody(Body):
    """An object as Go reads it."""

    @model_validator(mode="before")
    @classmethod
    def _known_in_any_case(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or raw.keys() <= cls.model_fields.keys():
            return raw
        fields = {}
        for name, value in raw.items():
            small = name.lower() if isinstance(name, str) else name
            known = small in cls.model_fields and small not in raw
            fields[small if known else name] = value
        return fields


class OllamaModel(OllamaBody):
    """The fields that all requests share: they name the model."""

    ignored_fields = frozenset({"verbose", "stream", "insecure", "system", "template", "options"})

    model: Text | None = Field(None, description="as in GET /v1/models")
    name: Text | None = Field(None, description="older name of `model`")
    keep_alive: Any = Field(
        None,
        description="without effect: the model stays loaded",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_go_reads_texts(cls, raw: Any) -> Any:
        try:
            return in_whole_characters(raw) if isinstance(raw, dict) else raw
        except RecursionError:
            return raw  # later validation refuses it

    @property
    def model_name(self) -> str:
        """The model's name; empty if there is none."""
        return self.model or self.name or ""

    @property
    def done_reason(self) -> Literal["load", "unload"]:
        """The reason that Ollama gives for the end of an empty request."""
        kept = str(self.keep_alive).lower()  # a number of seconds, or a text such as `0h0m0s`
        return (
            "unload" if "0" in kept and not any(digit in kept for digit in "123456789") else "load"
        )


def require_model(ctx: Context, body: OllamaModel, *, exact: bool = False) -> Engine:
    """Return the requested model's engine; see `check_model`.

    Args:
        ctx: the HTTP request's context.
        body: names the model.
        exact: see `check_model`.

    Raises:
        NotReady: see `AsyncEngine.engine`.
        ApiError: the client names no model, or another one.
    """
    name = body.model_name
    if not name:
        raise ApiError(400, "model is required", code="missing_parameter", param="model")
    return check_model(ctx, name, exact=exact)


def plain_answer(reply: BaseModel, ctx: Context, body: OllamaModel) -> Response:
    """Return the response to a request that does not need the engine.

    Args:
        reply: the response's JSON.
        ctx: the HTTP request's context.
        body: has the ignored fields.
    """
    ignore_unknown(ctx, body)
    return json_answer(reply, answer_headers(ctx), exclude_none=True)


def timestamp(time: datetime) -> str:
    """Return a time as Ollama writes it."""
    return time.isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Convert a duration as Ollama does: clients divide by it, so it is never 0."""
    return max(1, round(seconds * 1e9))
