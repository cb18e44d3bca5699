"""POST /generate: a prompt, its continuation, and what that took."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specops.http.schemas.options import STRICT, EngineOptions, Stops, Text, listed
from specops.request import GenerationRequest, GenerationStats, Output, SamplingParams


class GenerateRequest(EngineOptions):
    """A prompt to continue."""

    model_config = ConfigDict(
        **STRICT, json_schema_extra={"examples": [{"prompt": "def main(", "max_new_tokens": 50}]}
    )

    prompt: Text = Field(description="may be empty")
    system: Text | None = Field(
        None,
        description="makes the prompt a question: both go through the model's chat template, and "
        "the answer is the assistant's; empty: the template's own system message, if it has one",
    )
    max_new_tokens: int = Field(50, ge=1)
    temperature: float = Field(0.0, ge=0, le=2, description="0: always the likeliest token")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest that sum to this")
    seed: int | None = Field(
        None,
        ge=0,
        le=(1 << 63) - 1,
        description="same seed, same output, whatever drafter proposes and whatever else is served",
    )
    stop: Stops = Field(default=[], description="strings that end the output; not part of it")
    stream: bool = Field(False, description="server-sent events, one per step")
    details: bool = Field(False, description="add `details` to the answer")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, however many were given."""
        return listed(self.stop)

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are drawn."""
        return self.drawn(self.temperature, self.top_p, self.seed)


class SourceDetails(BaseModel):
    """How well one source's draft tokens did."""

    verified_per_position: list[int] = Field(
        description="item i: drafts whose token i + 1 was verified"
    )
    accepted_per_position: list[int] = Field(description="item i: those whose token was accepted")


class Details(BaseModel):
    """What a request cost, and how well its draft tokens did."""

    prompt_tokens: int
    cached_prompt_tokens: int = Field(description="of them, computed for an earlier request")
    generated_tokens: int
    sequence_steps: int = Field(description="decode and verify passes of the target")
    drafts: int = Field(description="passes with at least one draft token")
    draft_misses: int = Field(description="passes for which the drafter was asked and had nothing")
    draft_tokens: int = Field(description="draft tokens verified")
    accepted_tokens: int = Field(description="of them, those accepted")
    accepted_per_position: list[int] = Field(
        description="item i: drafts whose token i + 1 was accepted"
    )
    sources: dict[str, SourceDetails] = Field(
        description="the same by what proposed them: a drafter, or the grammar"
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
        description="speed over plain decoding, as the measured costs of the passes have it"
    )
    acceptance: dict[str, list[float]] = Field(
        description="per source of draft tokens: how often token i + 1 was accepted where those "
        "before it were"
    )
    preemptions: int = Field(
        description="how often it gave its KV blocks up to others and was computed again"
    )
    drafter: str
    k_draft: int
    adaptive: bool

    @classmethod
    def of(cls, stats: GenerationStats, request: GenerationRequest) -> Details:
        """Build from an engine's figures and what the request ran with."""
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
    """The continuation and what it took."""

    generated_text: str
    tokens_per_second: float = Field(
        description="tokens after the first, per second; 0 where there was only one"
    )
    avg_tokens_per_jump: float = Field(
        description="tokens after the first, per pass of the target; 0 where there was only one"
    )
    latency_ms: float = Field(description="from the request's arrival, waiting included")
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    generated_tokens: int
    request_id: str
    details: Details | None = None


def stream_event(output: Output) -> dict[str, Any]:
    """Return what one step brought: `text`, and each token's `id`, `text` and `origin`.

    A token's text is empty while a character is incomplete; its origin is `target`, the drafter
    whose draft token was accepted, or `grammar`. A stream ends with a `GenerateResponse` and then
    `[DONE]`.
    """
    # No model of pydantic's: this is done for every step, and takes a fifth of the time so.
    tokens = [
        {"id": piece.token, "text": piece.text, "origin": piece.origin} for piece in output.pieces
    ]
    return {"text": output.text, "tokens": tokens}
