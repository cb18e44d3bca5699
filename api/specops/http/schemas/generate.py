"""Bodies of POST /generate, this project's own endpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specops.http.schemas.body import STRICT, Text
from specops.http.schemas.options import MostTokens, SeededOptions, drawing_field
from specops.request import GenerationRequest, GenerationStats, Output


class GenerateRequest(SeededOptions):
    """A prompt to continue."""

    model_config = ConfigDict(
        **STRICT, json_schema_extra={"examples": [{"prompt": "def main(", "max_new_tokens": 50}]}
    )

    limit_field = "max_new_tokens"
    strict_limit = True

    prompt: Text = Field(description="may be empty")
    system: Text | None = Field(
        None,
        description="makes the prompt a question: both go through the model's chat template, and "
        "the answer is the assistant's; empty: the model's own system message, if it has one",
    )
    max_new_tokens: MostTokens = Field(
        50, description="most tokens of the answer; -1 and -2: as many as the server allows"
    )
    temperature: float = drawing_field("temperature", "0: always the likeliest token", 0.0)
    seed: int | None = Field(
        None,
        ge=0,
        le=(1 << 63) - 1,
        description="same seed, same output, with any drafter and beside any other requests",
    )
    details: bool = Field(False, description="add `details` to the answer")

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; None: as many as the server allows."""
        return self.max_new_tokens if self.max_new_tokens > 0 else None


class SourceDetails(BaseModel):
    """Counts of the draft tokens of one source."""

    verified_per_position: list[int] = Field(
        description="item i: number of drafts whose token i + 1 was verified"
    )
    accepted_per_position: list[int] = Field(
        description="item i: number of them that were accepted"
    )


class Details(BaseModel):
    """The cost of a request, and the figures of its draft tokens."""

    prompt_tokens: int
    cached_prompt_tokens: int = Field(description="tokens of the prompt from the cache")
    generated_tokens: int
    sequence_steps: int = Field(description="decode and verify passes of the target")
    drafts: int = Field(description="passes with at least one draft token")
    draft_misses: int = Field(description="passes for which the drafter proposed nothing")
    draft_tokens: int = Field(description="draft tokens verified")
    accepted_tokens: int = Field(description="draft tokens accepted")
    accepted_per_position: list[int] = Field(
        description="item i: number of drafts whose token i + 1 was accepted"
    )
    sources: dict[str, SourceDetails] = Field(
        description="the same counts by source: a drafter, or the grammar"
    )
    queue_seconds: float
    prefill_seconds: float = Field(description="from leaving the queue to the first token")
    decode_seconds: float = Field(description="from the first token to the last")
    tokens_per_jump: float = Field(
        description="tokens after the first, per pass; passes without a draft count"
    )
    mean_acceptance_length: float = Field(
        description="1 + accepted tokens per draft; passes without a draft do not count"
    )
    draft_length: float = Field(description="draft tokens per pass; passes without count as 0")
    estimated_speedup: float = Field(
        description="speed relative to plain decoding, by the cost model"
    )
    acceptance: dict[str, list[float]] = Field(
        description="per source of draft tokens: how often token i + 1 was accepted where those "
        "before it were"
    )
    preemptions: int = Field(
        description="number of times that the request lost its KV blocks and was computed again"
    )
    drafter: str
    k_draft: int
    adaptive: bool

    @classmethod
    def of(cls, stats: GenerationStats, request: GenerationRequest) -> Details:
        """Build from the engine's figures and the request."""
        return cls(
            **asdict(stats),
            draft_tokens=stats.draft_tokens,
            accepted_tokens=stats.accepted_tokens,
            accepted_per_position=list(stats.accepted_per_position),
            tokens_per_jump=stats.tokens_per_jump,
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_length=stats.draft_length,
            drafter=request.drafter,
            k_draft=request.k_draft,
            adaptive=request.adaptive,
        )


class GenerateResponse(BaseModel):
    """The generated text, and what it cost."""

    generated_text: str
    tokens_per_second: float = Field(
        description="tokens after the first, per second; 0 if there was only one"
    )
    avg_tokens_per_jump: float = Field(
        description="tokens after the first, per pass of the target; 0 if there was only one"
    )
    latency_ms: float = Field(description="from the request's arrival, waiting included")
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    generated_tokens: int
    request_id: str
    details: Details | None = None


def stream_event(output: Output) -> dict[str, Any]:
    """Return the event of one step: `text`, and each token's `id`, `text` and `origin`.

    A token's text is empty while a character is incomplete. Its origin is `target`, the drafter
    whose draft token was accepted, or `grammar`. A stream ends with a `GenerateResponse` and then
    `[DONE]`.
    """
    # Not a pydantic model: that takes five times as long, and this runs in every step.
    tokens = [
        {"id": piece.token, "text": piece.text, "origin": piece.origin} for piece in output.pieces
    ]
    return {"text": output.text, "tokens": tokens}
