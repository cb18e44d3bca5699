"""POST /v1/chat/completions, as OpenAI has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from specops.http.schemas.openai import Only, OpenAiRequest, Timings, Usage, wrong_together
from specops.http.schemas.options import STRICT, Text


class TextPart(BaseModel):
    """A part of a message; there are only texts."""

    model_config = STRICT

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One turn of the conversation."""

    model_config = STRICT

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None
    refusal: Annotated[Any, Only(None)] = Field(None, description="not supported")
    tool_calls: Annotated[Any, Only(None, [])] = Field(None, description="not supported")

    def for_template(self) -> dict[str, str]:
        """What a chat template is given: plain text, and the roles that templates know."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        # OpenAI's newer name for the same: the operator says how the assistant should be.
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": text}
        return message if self.name is None else message | {"name": self.name}


class ChatRequest(OpenAiRequest):
    """A conversation that the assistant goes on with."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, description="default: what the context and the server allow"
    )
    max_tokens: int | None = Field(None, ge=1, description="older name of max_completion_tokens")
    logprobs: bool | None = Field(False, description="tell each token's probability")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="and of so many others; only with `logprobs`"
    )

    response_format: Annotated[Any, Only(None, {"type": "text"})] = Field(
        None, description="not supported: text"
    )
    tools: Annotated[Any, Only(None, [])] = Field(None, description="not supported")
    tool_choice: Annotated[Any, Only(None, "none", "auto")] = Field(
        None, description="not supported"
    )
    functions: Annotated[Any, Only(None, [])] = Field(None, description="not supported")
    function_call: Annotated[Any, Only(None, "none", "auto")] = Field(
        None, description="not supported"
    )
    modalities: Annotated[Any, Only(None, ["text"])] = Field(
        None, description="not supported: text"
    )
    audio: Annotated[Any, Only(None)] = Field(None, description="not supported")
    prediction: Annotated[Any, Only(None)] = Field(
        None, description="not supported: `drafter` does it unasked"
    )
    web_search_options: Annotated[Any, Only(None)] = Field(None, description="not supported")
    parallel_tool_calls: bool | None = Field(None, description="ignored: there are no tools")
    reasoning_effort: str | None = Field(None, description="ignored")
    verbosity: str | None = Field(None, description="ignored")
    metadata: dict[str, Any] | None = Field(None, description="ignored")
    store: bool | None = Field(None, description="ignored: nothing is stored")
    service_tier: str | None = Field(None, description="ignored")
    safety_identifier: str | None = Field(None, description="ignored")
    prompt_cache_key: str | None = Field(None, description="ignored")
    prompt_cache_retention: str | None = Field(None, description="ignored")

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.stream_options is not None and not self.stream:
            raise wrong_together("stream_options", "only where `stream` is true")
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong_together("top_logprobs", "only where `logprobs` is true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise wrong_together("max_tokens", "not together with `max_completion_tokens`")
        return self


class TopLogprob(BaseModel):
    """A token that could have been here."""

    token: str
    logprob: float = Field(description="natural logarithm of its probability")
    bytes: list[int] = Field(description="UTF-8; a token may be a part of a character")


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Probabilities, one item per token of the answer."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
