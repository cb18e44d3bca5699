"""Shared by completions and chats of OpenAI's protocol: options, usage, timings, chunks.

Field names and defaults are OpenAI's. The server refuses a field that it does not support by
name, unless the value has no effect.
"""

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, WithJsonSchema, model_validator

from specops.engine.engine import Engine
from specops.http.answering.schema import (
    Body,
    Integer,
    ReportingOptions,
    Text,
    TokenId,
    conflict,
)
from specops.http.answering.submit import fingerprint
from specops.http.answering.writer import Answer, Generation, Writer, prompt_logprobs
from specops.http.errors import EVENTS, GENERATING, error_responses
from specops.http.sse import DONE, event
from specops.request import TokenOutput

ERRORS = error_responses(*GENERATING, 404)
RESPONSES = EVENTS | ERRORS
MAX_CHOICES = 128  # OpenAI's limit of `n`
MAX_LIKELY = 20  # tokens per position: OpenAI's limit of `top_logprobs`
_ITEMS = {"type": ["object", "null"]}
PromptLogprobs = Annotated[Any, WithJsonSchema({"type": ["array", "null"], "items": _ITEMS})]


class StreamOptions(Body):
    """How a stream ends."""

    ignored_fields = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(None, description="add a last chunk with the usage")
    continuous_usage_stats: bool | None = Field(
        None, description="report the usage so far in every chunk; only with `include_usage`"
    )


class OpenAiRequest(ReportingOptions):
    """The fields that completions and chat share."""

    ignored_fields = frozenset({"user"})

    model: Text | None = Field(None, description="as in GET /v1/models")
    n: Integer = Field(1, ge=1, le=MAX_CHOICES, description="answers to each prompt")
    stream_options: StreamOptions | None = Field(None, description="only if `stream` is true")
    logprob_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_LIKELY)] | None
    ) = Field(None, description="with `logprobs`: report these tokens in place of the likeliest")
    prompt_logprobs: Integer = Field(
        None,
        ge=0,
        le=MAX_LIKELY,
        description="report the probability and rank of each prompt token, and of this many "
        "likeliest alternatives; not in streams",
    )
    return_token_ids: bool | None = Field(
        False, description="report `prompt_token_ids`, and each choice's `token_ids`"
    )
    return_tokens_as_token_ids: bool | None = Field(
        False, description="write tokens as `token_id:NUMBER` in log-probabilities"
    )
    include_stop_str_in_output: bool | None = Field(
        False, description="keep the stop string at the end of the answer"
    )

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "requires `stream` to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise conflict("prompt_logprobs", "cannot be combined with `stream`")
        if self.logprob_token_ids and self.token_logprobs is None:
            raise conflict("logprob_token_ids", "requires `logprobs`")
        return self

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def logprob_tokens(self) -> Sequence[int]:
        """Tokens to report for each position, instead of the likeliest."""
        return self.logprob_token_ids or ()

    @property
    def prompt_top(self) -> int | None:
        """Number of likeliest tokens to report for each prompt token; None: nothing."""
        return self.prompt_logprobs

    @property
    def includes_stop(self) -> bool:
        """Whether the answer keeps the stop string that ends it."""
        return bool(self.include_stop_str_in_output)


class PromptTokensDetails(BaseModel):
    """Where the prompts' tokens came from."""

    cached_tokens: int = Field(description="tokens from the cache")


class CompletionTokensDetails(BaseModel):
    """What the answers' tokens were for."""

    reasoning_tokens: int = Field(
        description="estimated from the reasoning's share of the characters"
    )


class Usage(BaseModel):
    """Tokens in and out; a prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(BaseModel):
    """llama-server's figures, and the draft tokens'; sums over all choices."""

    cache_n: int = Field(description="prompt tokens from the cache")
    prompt_n: int = Field(description="prompt tokens computed")
    prompt_ms: float = Field(description="from leaving the queue to the first token")
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int = Field(description="tokens generated")
    predicted_ms: float = Field(description="from the first token to the last")
    predicted_per_token_ms: float = Field(description="per token after the first")
    predicted_per_second: float = Field(description="tokens after the first, for one choice")
    draft_n: int = Field(description="draft tokens verified")
    draft_n_accepted: int = Field(description="draft tokens accepted")
    accepted_found_in: dict[str, int] = Field(description="as in `/generate`'s `details`")
    queue_ms: float = Field(description="waiting for a slot")
    steps: int = Field(description="decode and verify passes of the target")
    tokens_per_step: float = Field(description="tokens after the first, per pass")
    drafter: str


class InputTokens(BaseModel):
    """The number of tokens of a conversation's prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class OpenAiWriter(Writer):
    """Writes completions and chats, whole or in chunks.

    Args:
        generation: the answers.
        engine: names the model.
        prefix: beginning of the answer's id.
        kind: the `object` of each body or chunk.
        body: the request.

    Attributes:
        heading: the first fields of every body and chunk.
    """

    def __init__(
        self, generation: Generation, engine: Engine, prefix: str, kind: str, body: OpenAiRequest
    ) -> None:
        super().__init__(generation)
        self.engine = engine
        self.heading: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": engine.info.name,
            "system_fingerprint": fingerprint(engine),
        }
        self._body = body
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(options and options.continuous_usage_stats)

    def prompt_logprobs(self, index: int) -> Iterator[dict[str, Any] | None] | None:
        """Return the probabilities of an answer's prompt, if requested."""
        answer, top = self.generation.answers[index], self._body.prompt_logprobs
        if top is None:
            return None
        sent = answer.request.prompt_tokens
        return prompt_logprobs(sent, answer.prompt, top, self.engine.tokenizer)

    def token_ids(self, index: int, pieces: Sequence[TokenOutput]) -> dict[str, list[int]]:
        """Return the pieces' tokens; with an answer's first pieces, also its prompt's."""
        if not self._body.return_token_ids:
            return {}
        answer, ids = self.generation.answers[index], [piece.token for piece in pieces]
        first = len(answer.pieces) == len(pieces)
        prompt = {"prompt_token_ids": list(answer.request.prompt_tokens)} if first else {}
        return {"token_ids": ids, **prompt}

    def chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        """Return the event of a chunk; the chunk that ends the last answer has the timings."""
        answer = self.generation.answers[choice["index"]]
        data = self.heading | more | {"choices": [choice]}
        if self._include_usage:
            so_far = usage(self.generation).model_dump() if self._continuous_usage else None
            data["usage"] = so_far
        elif self.generation.complete and choice["finish_reason"]:
            data["timings"] = timings(self.generation.answers).model_dump()
        begins = "role" in choice.get("delta", ())  # a chunk that has nothing to report yet
        return event(data if begins else reports(answer) | data)

    def end(self) -> bytes:
        """Return the events after all choices."""
        if not self._include_usage:
            return DONE
        figures = {
            "usage": usage(self.generation).model_dump(),
            "timings": timings(self.generation.answers).model_dump(),
        }
        return event(self.heading | {"choices": []} | figures) + DONE


def usage(generation: Generation) -> Usage:
    """Count the tokens so far; the choices of one prompt share its tokens."""
    prompts = generation.answers[:: generation.choices]
    prompt = sum(len(answer.request.prompt_tokens) for answer in prompts)
    generated = sum(answer.generated_tokens for answer in generation.answers)
    cached = sum(answer.stats.cached_prompt_tokens for answer in prompts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(answer.reasoning_tokens for answer in generation.answers)
        ),
    )


def timings(answers: Sequence[Answer]) -> Timings:
    """Sum up the answers' figures."""
    stats = [answer.stats for answer in answers]
    cached = sum(item.cached_prompt_tokens for item in stats)
    prompt = sum(item.prompt_tokens for item in stats) - cached
    prompt_seconds = sum(item.prefill_seconds for item in stats)
    decoded = sum(max(0, item.generated_tokens - 1) for item in stats)
    seconds = sum(item.decode_seconds for item in stats)
    steps = sum(item.sequence_steps for item in stats)
    return Timings(
        cache_n=cached,
        prompt_n=prompt,
        prompt_ms=prompt_seconds * 1000,
        prompt_per_token_ms=_per(prompt_seconds * 1000, prompt),
        prompt_per_second=_per(prompt, prompt_seconds),
        predicted_n=sum(item.generated_tokens for item in stats),
        predicted_ms=seconds * 1000,
        predicted_per_token_ms=_per(seconds * 1000, decoded),
        predicted_per_second=_per(decoded, seconds),
        draft_n=sum(item.draft_tokens for item in stats),
        draft_n_accepted=sum(item.accepted_tokens for item in stats),
        accepted_found_in=dict(sum((Counter(one.accepted_found_in) for one in stats), Counter())),
        queue_ms=sum(item.queue_seconds for item in stats) * 1000,
        steps=steps,
        tokens_per_step=_per(decoded, steps),
        drafter=answers[0].request.drafter,
    )


def reports(answer: Answer) -> dict[str, Any]:
    """Return the progress fields of a stream's event, if requested.

    Progress on the prompt is reported once.
    """
    stats, told = answer.stats, dict[str, Any]()
    if answer.request.step_stats and answer.pieces:
        told["timings"] = timings([answer]).model_dump()
    if answer.prompt_computed:
        told["prompt_progress"] = {
            "total": stats.prompt_tokens,
            "cache": stats.cached_prompt_tokens,
            "processed": answer.prompt_computed,
            "time_ms": stats.prefill_seconds * 1000,
        }
        answer.prompt_computed = 0
    return told


def _per(count: float, unit: float) -> float:
    return count / unit if unit > 0 else 0.0
