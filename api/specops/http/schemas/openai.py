"""What OpenAI's endpoints share: options, usage, timings, the list of models.

Field names and defaults are OpenAI's. Fields of that API that this server does not support are
refused by name, unless their value asks for nothing.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from specops.http.schemas.body import Body, absent
from specops.http.schemas.options import SeededOptions

MOST_CHOICES = 128  # OpenAI's own bound of `n`


class StreamOptions(Body):
    """How a stream ends."""

    without_effect = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(None, description="one more chunk, with the usage")


class OpenAiRequest(SeededOptions):
    """The fields that completions and chat share."""

    without_effect = frozenset({"user"})

    model: str = Field(description="as GET /v1/models tells")
    n: int | None = Field(1, ge=1, le=MOST_CHOICES, description="answers to each prompt")
    stream_options: StreamOptions | None = Field(None, description="only where `stream` is true")

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """A stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class PromptTokensDetails(BaseModel):
    """Where the tokens of the prompts came from."""

    cached_tokens: int = Field(description="computed for an earlier request")


class CompletionTokensDetails(BaseModel):
    """What the tokens of the answers were for."""

    reasoning_tokens: int = Field(description="by the thoughts' share of the characters")


class Usage(BaseModel):
    """Tokens in and out; a prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(BaseModel):
    """The figures of llama.cpp's server, and those of the draft tokens; sums over all choices."""

    cache_n: int = Field(description="tokens of the prompts that needed no pass")
    prompt_n: int = Field(description="the other tokens of the prompts")
    prompt_ms: float = Field(description="from leaving the queue to the first token")
    prompt_per_second: float
    predicted_n: int = Field(description="tokens generated")
    predicted_ms: float = Field(description="from the first token to the last")
    predicted_per_second: float = Field(description="tokens after the first, of one choice")
    draft_n: int = Field(description="draft tokens verified")
    draft_n_accepted: int = Field(description="draft tokens accepted")
    queue_ms: float = Field(description="before a slot was free")
    steps: int = Field(description="decode and verify passes of the target")
    tokens_per_step: float = Field(
        description="tokens after the first, per pass; passes without a draft count"
    )
    drafter: str


class Model(BaseModel):
    """The served model, with the fields that OpenAI's, Anthropic's and vLLM's clients read."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str = Field(description="the same time in RFC 3339's form")
    owned_by: str = "specops"
    lifecycle: Literal["active"] = "active"
    line: None = None
    deprecated_at: None = None
    retires_at: None = None
    max_input_tokens: int = Field(description="longest prompt: one token less than the context")
    max_tokens: int = Field(description="longest answer")
    capabilities: dict[str, Any] = Field(description="in Anthropic's form")
    context_length: int = Field(description="tokens per request, prompt and output together")
    max_model_len: int = Field(description="the same by vLLM's name")
    quantization: str
    drafters: list[str]
    chat: bool = Field(description="the model answers messages; otherwise it continues texts")
    batch_invariant: bool = Field(
        description="output is bit for bit the same alone and beside others, speculative or not"
    )
    foreign_products: list[str] = Field(
        description="nodes of the graph that prevent batch invariance; empty where there is none"
    )
    sampling: dict[str, float] = Field(
        description="how tokens are drawn where a request does not say it and the temperature is "
        "not 0; what is not here is the protocol's default"
    )
    system: str | None = Field(
        None,
        exclude_if=absent,
        description="system message of conversations that have none; missing: the template's own",
    )


class ModelList(BaseModel):
    """All models that are served: one."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False
    first_id: str
    last_id: str
