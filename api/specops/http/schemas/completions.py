"""Bodies of OpenAI's POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from specops.http.schemas.body import Text, TokenId, wrong_together
from specops.http.schemas.openai import MOST_CHOICES, OpenAiRequest, Timings, Usage

_DEFAULT_TOKENS = 16  # OpenAI's
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompts = (
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_CHOICES)]
)


class CompletionRequest(OpenAiRequest):
    """One or several prompts to continue, as text or as tokens."""

    limit_field = "max_tokens"
    strict_limit = True

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=-2)] | None = Field(
        _DEFAULT_TOKENS,
        description="0: generate nothing, only with `echo`; -1: as many as the server allows",
    )
    logprobs: int | None = Field(
        None, ge=0, le=5, description="report each token's probability, and of so many others"
    )
    echo: bool | None = Field(False, description="begin the answer with the prompt")
    best_of: int | None = Field(
        None,
        ge=1,
        le=MOST_CHOICES,
        description="draw so many answers, return the `n` of the highest mean log-probability",
    )
    suffix: Text | None = Field(
        None, description="what follows the answer, for models that were trained to fill in"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise wrong_together("stream_options", "only where `stream` is true")
        if self.best_of is not None and self.best_of < self.returned:
            raise wrong_together("best_of", "at least `n`")
        if self.ranks and self.stream:
            raise wrong_together("best_of", "no more than `n` where `stream` is true")
        if self.suffix and self.echo:
            raise wrong_together("suffix", "not together with `echo`")
        if self.max_tokens == 0 and (self.stream or not self.echo):
            raise wrong_together("max_tokens", "0 only together with `echo`, and not streamed")
        return self

    @property
    def returned(self) -> int:
        """Number of answers to each prompt that the client gets."""
        return self.n or 1

    @property
    def choices(self) -> int:
        """Number of answers to each prompt that are drawn."""
        return self.best_of or self.returned

    @property
    def ranks(self) -> bool:
        """More answers are drawn than returned: the best ones have to be found."""
        return self.choices > self.returned

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer; the engine generates one even where none is asked for."""
        limit = _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        return None if limit < 0 else max(1, limit)

    @property
    def token_logprobs(self) -> int | None:
        """Number of likeliest tokens to report; ranking needs the chosen tokens' at least."""
        return 0 if self.ranks and self.logprobs is None else self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, also where there is only one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class CompletionLogprobs(BaseModel):
    """Natural logarithms of probabilities, one item per token of the text."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null: the token follows nothing")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="where in the choice's text the token begins")


class CompletionChoice(BaseModel):
    """One answer, or in a stream the part of it that a step brought."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class Completion(BaseModel):
    """All answers; in a stream what one step brought, with the usage in the last event."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None
