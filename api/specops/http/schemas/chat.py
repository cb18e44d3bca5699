"""Bodies of OpenAI's POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from specops.http.errors import InvalidField
from specops.http.schemas.body import Body, FreeObject, Only, Text, absent, wrong_together
from specops.http.schemas.conversation import (
    Content,
    Conversation,
    Mode,
    Parameters,
    ToolName,
    call_message,
    conversation,
    joined,
    joined_before,
    result_message,
)
from specops.http.schemas.openai import OpenAiRequest, Timings, Usage
from specops.http.schemas.options import MostTokens
from specops.text.tools.formats import Tool

# The id of calls in OpenAI's older form, which has none. Mistral's templates take nine characters.
_FUNCTION_CALL = "functions"


class FunctionCall(Body):
    """The function that was called."""

    name: Text
    arguments: Text = Field(description="JSON")


class CustomCall(Body):
    """The custom tool that was called, whose input is no JSON."""

    name: Text
    input: Text


class ToolCall(Body):
    """A call that the assistant made."""

    id: Text
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    def parts(self) -> tuple[str, str, Any]:
        """Return the id, the name and the arguments."""
        if self.type == "custom" and self.custom is not None:
            return self.id, self.custom.name, {"input": self.custom.input}
        if self.function is None:
            message = f"a call of the type {self.type!r} has no {self.type}"
            raise InvalidField("messages", message, code="missing_parameter")
        return self.id, self.function.name, self.function.arguments


class Message(Body):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = Field(None, description="null only of assistant, tool and function")
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = Field(None, description="id of the call that a result answers")
    reasoning_content: Text | None = Field(None, description="what the assistant thought")
    refusal: Text | None = Field(None, description="what the assistant said instead of an answer")
    function_call: FunctionCall | None = Field(None, description="older form of `tool_calls`")

    def for_template(self, left_out: list[str]) -> dict[str, Any]:
        """Return the message for a chat template: plain text, and a role that templates know.

        Args:
            left_out: gets the names of parts that are left out of it.
        """
        name = {} if self.name is None else {"name": self.name}
        if self.role in ("tool", "function"):
            call_id = self.tool_call_id if self.role == "tool" else _FUNCTION_CALL
            if call_id is None:
                message = "a message of the role 'tool' needs its tool_call_id"
                raise InvalidField("messages", message, code="missing_parameter")
            text = joined_before(self.content, "messages", left_out, result=True)
            return result_message(call_id, text, self.name)
        if self.role == "assistant":
            text = joined_before(self.content, "messages", left_out) or self.refusal or ""
            calls = [call.parts() for call in self.tool_calls or ()]
            if (call := self.function_call) is not None:
                calls.append((_FUNCTION_CALL, call.name, call.arguments))
            return call_message(text, calls, self.reasoning_content or "") | name
        if self.content is None:
            raise InvalidField("messages", "a message has no content", code="missing_parameter")
        # `developer` is OpenAI's newer name of `system`.
        role = self.role.replace("developer", "system")
        return {"role": role, "content": joined(self.content, "messages")} | name


class Function(Body):
    """A function that the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(False, description="arguments follow the schema")


class ChatTool(Body):
    """A tool that the model may call; this server only has the type `function`."""

    type: Text
    function: Function | None = None

    def tool(self) -> Tool | None:
        """Return the function, or None for another type of tool.

        Raises:
            InvalidField: the function is missing.
        """
        if self.type != "function":
            return None
        if (own := self.function) is None:
            raise InvalidField("tools", "a function is missing", code="missing_parameter")
        return Tool(own.name, own.description or "", own.parameters, bool(own.strict))


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: Function


class AllowedTools(Body):
    """The tools that may be called, of all that the prompt describes."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


class AllowedChoice(Body):
    """Some of the tools may be called, or must be."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


class ChatRequest(OpenAiRequest):
    """A conversation that the assistant continues."""

    without_effect = OpenAiRequest.without_effect | {
        *("metadata", "store", "service_tier", "safety_identifier", "prediction"),
        *("reasoning_effort", "verbosity", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "moderation"),
    }

    # The first wrong message ends the check: 400,000 of them, in 1 MB, would take 4 s to list.
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: MostTokens | None = Field(
        None, description="default, and -1: what the context and the server allow"
    )
    max_tokens: MostTokens | None = Field(None, description="older name of max_completion_tokens")
    logprobs: bool | None = Field(False, description="report each token's probability")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="report so many likely tokens beside it; only with `logprobs`",
    )

    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = Field(
        None, description="functions that the model may call; other types are skipped"
    )
    tool_choice: Mode | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(True, description="false: one call at most")
    chat_template_kwargs: FreeObject | None = Field(
        None, description="more variables for the chat template, such as `enable_thinking`"
    )
    return_tokens: bool | None = Field(
        False, description="streams: each choice has `tokens`, like the events of `/generate`"
    )
    functions: Annotated[Any, Only(None, [])] = Field(None, description="not supported: `tools`")
    function_call: Annotated[Any, Only(None, "none", "auto")] = Field(
        None, description="not supported: `tool_choice`"
    )
    modalities: Annotated[Any, Only(None, ["text"])] = Field(
        None, description="not supported: text"
    )
    audio: Annotated[Any, Only(None)] = Field(None, description="not supported")
    web_search_options: Annotated[Any, Only(None)] = Field(None, description="not supported")

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.stream_options is not None and not self.stream:
            raise wrong_together("stream_options", "only where `stream` is true")
        if self.top_logprobs and not self.logprobs:
            raise wrong_together("top_logprobs", "only where `logprobs` is true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise wrong_together("max_tokens", "not together with `max_completion_tokens`")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer; None: as many as the server allows."""
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return limit if limit and limit > 0 else None

    @property
    def token_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> Conversation:
        """Return the conversation without the protocol.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        mode, named, allowed = self._choice()
        left_out: list[str] = []
        return conversation(
            [message.for_template(left_out) for message in self.messages],
            "messages",
            self.tools,
            mode,
            named,
            allowed=allowed,
            left_out=left_out,
            parallel=self.parallel_tool_calls is not False,
            template_options=self.chat_template_kwargs or {},
        )

    def _choice(self) -> tuple[Mode | None, str | None, list[str] | None]:
        """Return whether tools are called, the one that must be, and those that may be."""
        match self.tool_choice:
            case NamedTool(function=function):
                return "required", function.name, None
            case AllowedChoice(allowed_tools=allowed):
                return allowed.mode, None, [tool.function.name for tool in allowed.tools]
            case mode:
                return mode, None, None


class TopLogprob(BaseModel):
    """A token that was possible at this place."""

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


class AnswerCall(BaseModel):
    """A call that the assistant makes."""

    id: str
    type: Literal["function"] = "function"
    function: dict[Literal["name", "arguments"], str] = Field(description="arguments are JSON")


class AnswerMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="null where the assistant only calls tools")
    refusal: None = None
    annotations: list[Any] = Field(default=[], description="empty: nothing was searched")
    reasoning_content: str | None = Field(
        None, exclude_if=absent, description="what the assistant thought, if it did"
    )
    tool_calls: list[AnswerCall] | None = Field(None, exclude_if=absent)


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


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
