"""What OpenAI's endpoints have in common: options, usage, timings, the list of models.

Field names and defaults are OpenAI's. What that API knows and this server does not do is refused by
name, unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from annotated_types import GroupedMetadata
from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from specops.http.schemas.options import Body, EngineOptions, Stops, listed
from specops.request import GenerationStats, SamplingParams

MOST_CHOICES = 128  # OpenAI's own bound of `n`


class Only(GroupedMetadata):
    """Marks a field that takes nothing but values that ask for nothing."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def __iter__(self) -> Iterator[object]:
        yield AfterValidator(self._check)
        yield WithJsonSchema({"enum": list(self._neutral)})

    def _check(self, value: Any) -> Any:
        for neutral in self._neutral:  # False is no 0
            if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
                return value
        raise PydanticCustomError("unsupported", "this server does not support it")


class StreamOptions(Body):
    """How a stream ends."""

    without_effect = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(None, description="one more chunk, with the usage")


class OpenAiRequest(EngineOptions):
    """The fields that completions and chat share."""

    without_effect = frozenset({"user"})

    model: str = Field(description="as GET /v1/models tells")
    temperature: float | None = Field(1.0, ge=0, le=2, description="0: always the likeliest token")
    top_p: float | None = Field(
        1.0, gt=0, le=1, description="draw from the likeliest that sum to this"
    )
    n: int | None = Field(1, ge=1, le=MOST_CHOICES, description="answers to each prompt")
    seed: int | None = Field(
        None,
        ge=-(1 << 63),
        le=(1 << 63) - 1,
        description="same seed, same output; choice i has seed + i",
    )
    stop: Stops | None = Field(None, description="strings that end the output; not part of it")
    stream: bool | None = Field(False, description="server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only where `stream` is true")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, however many were given."""
        return listed(self.stop)

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """A stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, choice: int) -> SamplingParams:
        """How the tokens of one of the choices are drawn."""
        # Any seed of 64 bits is fine with us, negative ones are not.
        seed = None if self.seed is None else (self.seed + choice) % (1 << 63)
        return self.drawn(self.temperature, self.top_p, seed)


class PromptTokensDetails(BaseModel):
    """What the tokens of the prompts were."""

    cached_tokens: int = Field(description="computed for an earlier request")


class Usage(BaseModel):
    """Tokens in and out; a prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(BaseModel):
    """What llama.cpp's server calls so, and how the draft tokens did; sums over all choices."""

    cache_n: int = Field(description="tokens of the prompts that needed no pass")
    prompt_n: int = Field(description="the others")
    prompt_ms: float = Field(description="from leaving the queue to the first token")
    prompt_per_second: float
    predicted_n: int = Field(description="tokens generated")
    predicted_ms: float = Field(description="from the first token to the last")
    predicted_per_second: float = Field(description="tokens after the first, of one choice")
    draft_n: int = Field(description="draft tokens verified")
    draft_n_accepted: int = Field(description="of them, those accepted")
    queue_ms: float = Field(description="before a slot was free")
    steps: int = Field(description="decode and verify passes of the target")
    tokens_per_step: float = Field(
        description="tokens after the first, per pass; passes without a draft count"
    )
    drafter: str

    @classmethod
    def of(cls, all_stats: Iterable[GenerationStats], drafter: str) -> Timings:
        """Sum up what the choices took."""
        stats = list(all_stats)
        cached = sum(item.cached_prompt_tokens for item in stats)
        prompt = sum(item.prompt_tokens for item in stats) - cached
        prompt_seconds = sum(item.prefill_seconds for item in stats)
        generated = sum(item.generated_tokens for item in stats)
        decoded = sum(max(0, item.generated_tokens - 1) for item in stats)
        seconds = sum(item.decode_seconds for item in stats)
        steps = sum(item.sequence_steps for item in stats)
        return cls(
            cache_n=cached,
            prompt_n=prompt,
            prompt_ms=_ms(prompt_seconds),
            prompt_per_second=_per(prompt, prompt_seconds),
            predicted_n=generated,
            predicted_ms=_ms(seconds),
            predicted_per_second=_per(decoded, seconds),
            draft_n=sum(item.draft_tokens for item in stats),
            draft_n_accepted=sum(item.accepted_tokens for item in stats),
            queue_ms=_ms(sum(item.queue_seconds for item in stats)),
            steps=steps,
            tokens_per_step=_per(decoded, steps),
            drafter=drafter,
        )


class Model(BaseModel):
    """What is served, with the fields that OpenAI's, Anthropic's and vLLM's clients read."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str = Field(description="the same as RFC 3339 writes it")
    owned_by: str = "specops"
    context_length: int = Field(description="tokens per request, prompt and output together")
    max_model_len: int = Field(description="the same by vLLM's name")
    quantization: str
    drafters: list[str]
    chat: bool = Field(description="it answers messages; else it continues texts")
    batch_invariant: bool = Field(
        description="output is bit for bit the same alone and beside others, speculative or not"
    )
    foreign_products: list[str] = Field(
        description="nodes of the graph that keep it from being so; empty where it is"
    )


class ModelList(BaseModel):
    """All that is served: one model."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _per(count: float, unit: float) -> float:
    return round(count / unit, 3) if unit > 0 else 0.0
