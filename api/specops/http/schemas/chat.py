"""POST /v1/chat/completions, as OpenAI has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from specops.http.errors import InvalidField
from specops.http.schemas.conversation import (
    Content,
    Conversation,
    Parameters,
    ToolChoice,
    ToolName,
    call_message,
    joined,
    result_message,
    with_names,
)
from specops.http.schemas.openai import Only, OpenAiRequest, Timings, Usage
from specops.http.schemas.options import Body, Text, wrong_together
from specops.text.tools.formats import Tool


class FunctionCall(Body):
    """What was called."""

    name: ToolName
    arguments: Text = Field(description="JSON")


class ToolCall(Body):
    """A call that the assistant made."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="null only where the assistant called tools")
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = Field(None, description="which call a tool's message answers")
    reasoning_content: Text | None = Field(None, description="what the assistant thought")
    refusal: Annotated[Any, Only(None)] = Field(None, description="not supported")

    def for_template(self) -> dict[str, Any]:
        """What a chat template is given: plain text, and the roles that templates know."""
        if self.content is None and not self.tool_calls:
            raise InvalidField("messages", "a message has no content", code="missing_parameter")
        text = joined(self.content, "messages")
        name = {} if self.name is None else {"name": self.name}
        if self.role == "tool":
            if self.tool_call_id is None:
                message = "a message of the role 'tool' needs its tool_call_id"
                raise InvalidField("messages", message, code="missing_parameter")
            return result_message(self.tool_call_id, text, self.name)
        if self.role == "assistant":
            calls = [
                (call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls or ()
            ]
            return call_message(text, calls, self.reasoning_content or "") | name
        # OpenAI's newer name for the same: the operator says how the assistant should be.
        return {"role": self.role.replace("developer", "system"), "content": text} | name


class Function(Body):
    """A function of the client's."""

    name: ToolName
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(False, description="arguments follow the schema")

    def tool(self) -> Tool:
        """The function as all protocols have it."""
        return Tool(self.name, self.description or "", self.parameters, bool(self.strict))


class ChatTool(Body):
    """What the model may call; of other types than `function` there are none here."""

    type: Text
    function: Function | None = None


def applied(choice: ToolChoice, tools: Sequence[ChatTool]) -> dict[str, Any]:
    """A conversation's fields that say what may be called.

    Raises:
        InvalidField: a function is missing, or see `ToolChoice.apply`.
    """
    if any(tool.type == "function" and tool.function is None for tool in tools):
        raise InvalidField("tools", "a function is missing", code="missing_parameter")
    functions = [tool.function for tool in tools if tool.function and tool.type == "function"]
    return choice.apply(
        (function.tool() for function in functions),
        (tool.type for tool in tools if tool.type != "function"),
    )


class NamedFunction(Body):
    """Which function to call."""

    name: ToolName


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(OpenAiRequest):
    """A conversation that the assistant goes on with."""

    without_effect = OpenAiRequest.without_effect | {
        *("metadata", "store", "service_tier", "safety_identifier", "prediction"),
        *("reasoning_effort", "verbosity", "prompt_cache_key", "prompt_cache_retention"),
    }

    # The first wrong one ends the check: 400,000, in 1 MB, would take 4 s to list.
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(
        None, ge=1, description="default: what the context and the server allow"
    )
    max_tokens: int | None = Field(None, ge=1, description="older name of max_completion_tokens")
    logprobs: bool | None = Field(False, description="tell each token's probability")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="and of so many others; only with `logprobs`"
    )

    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = Field(
        None, description="functions that the model may call; other types are skipped"
    )
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(True, description="false: one call at most")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="more for the model's chat template, such as `enable_thinking`"
    )
    return_tokens: bool | None = Field(
        False, description="streams: each choice has `tokens`, as the events of `/generate`"
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
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong_together("top_logprobs", "only where `logprobs` is true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise wrong_together("max_tokens", "not together with `max_completion_tokens`")
        return self

    def conversation(self) -> Conversation:
        """What is asked, without the protocol.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        match self.tool_choice:
            case NamedTool(function=function):
                choice = ToolChoice("required", function.name)
            case mode:
                choice = ToolChoice(mode or "auto")
        return Conversation(
            messages=with_names([message.for_template() for message in self.messages]),
            source="messages",
            limit=self.max_completion_tokens if self.max_tokens is None else self.max_tokens,
            sampling=self.sampling,
            parallel=self.parallel_tool_calls is not False,
            template_options=self.chat_template_kwargs or {},
            choices=self.choices,
            stops=self.stops,
            stream=bool(self.stream),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            **applied(choice, self.tools or ()),
        )


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


def _absent(value: object) -> bool:
    return value is None


class AnswerCall(BaseModel):
    """A call that the assistant makes."""

    id: str
    type: Literal["function"] = "function"
    function: dict[Literal["name", "arguments"], str] = Field(description="arguments are JSON")


class AnswerMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="null where it only calls tools")
    refusal: None = None
    reasoning_content: str | None = Field(
        None, exclude_if=_absent, description="what it thought, where it does"
    )
    tool_calls: list[AnswerCall] | None = Field(None, exclude_if=_absent)


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
