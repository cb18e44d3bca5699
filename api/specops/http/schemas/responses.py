"""Bodies of OpenAI's POST /v1/responses. A request has the whole conversation."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from specops.http.errors import InvalidField
from specops.http.schemas.body import Body, FreeObject, Only, Text, known_fields
from specops.http.schemas.constraints import (
    AnyText,
    JsonObject,
    NamedSchema,
)
from specops.http.schemas.conversation import (
    Content,
    Conversation,
    Message,
    Mode,
    Parameters,
    Part,
    ToolName,
    Typed,
    call_message,
    conversation,
    joined,
    result_message,
)
from specops.http.schemas.options import EngineOptions
from specops.request import Grammar
from specops.text.tools.formats import Tool

_FIELD = "input"
_TOLD = "part of the answer, and without effect"


class Item(Typed):
    """A message, a thought, a call of a tool or its result."""

    without_effect = frozenset({"status", "encrypted_content", "id", "phase"})
    source, called = _FIELD, "an item"

    type: str = Field(
        "message",
        json_schema_extra={
            "enum": ["message", "function_call", "function_call_output", "reasoning"]
        },
    )
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: Text | None = None
    name: ToolName | None = None
    arguments: Text | None = Field(None, description="JSON")
    output: Content | None = None
    summary: Annotated[list[Part], Field(fail_fast=True)] | None = None


class ResponsesTool(Body):
    """A tool that the model may call; this server only has the type `function`."""

    type: Text
    name: ToolName | None = None
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(None, description="arguments follow the schema")

    def tool(self) -> Tool | None:
        """Return the function, or None for another type of tool.

        Raises:
            InvalidField: the function's name is missing.
        """
        if self.type != "function":
            return None
        if self.name is None:
            raise InvalidField("tools", "a function has no name", code="missing_parameter")
        return Tool(self.name, self.description or "", self.parameters, bool(self.strict))

    def told(self) -> dict[str, Any]:
        """Return the tool for the answer, which has the fields that the client sent."""
        return {
            name: value
            for name, value in known_fields(self).items()
            if name in self.model_fields_set
        }


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: ToolName


class Reasoning(Body):
    """Whether a model thinks, if it can."""

    without_effect = frozenset({"summary", "generate_summary"})

    effort: str | None = Field(None, description="`none` turns it off; else without effect")


class FlatSchema(NamedSchema):
    """A JSON schema with this protocol's fields around it."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """The form of the answer's text."""

    without_effect = frozenset({"verbosity"})

    format: Annotated[AnyText | JsonObject | FlatSchema, Field(discriminator="type")] | None = None


class ResponsesRequest(EngineOptions):
    """A conversation that the assistant continues."""

    without_effect = frozenset(
        {
            *("include", "service_tier", "prompt_cache_retention", "store", "stream_options"),
            *("top_logprobs", "truncation", "client_metadata"),
        }
    )

    limit_field = "max_output_tokens"

    model: str = Field(description="as GET /v1/models tells")
    input: Text | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: Text | None = Field(None, description="the system message")
    max_output_tokens: int | None = Field(
        None, ge=1, description="default: what the context and the server allow"
    )
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True)] | None = Field(
        None, description="functions that the model may call; other types are skipped"
    )
    tool_choice: Mode | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(True, description="false: one call at most")
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    max_tool_calls: int | None = Field(None, description=_TOLD)
    metadata: FreeObject | None = Field(None, description=_TOLD)
    prompt_cache_key: Text | None = Field(None, description=_TOLD)
    safety_identifier: Text | None = Field(None, description=_TOLD)
    user: Text | None = Field(None, description=_TOLD)

    previous_response_id: Annotated[Any, Only(None)] = Field(
        None, description="not supported: nothing is stored"
    )
    conversation_id: Annotated[Any, Only(None)] = Field(
        None, alias="conversation", description="not supported: nothing is stored"
    )
    background: Annotated[Any, Only(None, False)] = Field(None, description="not supported")
    prompt: Annotated[Any, Only(None)] = Field(None, description="not supported")

    @property
    def effort(self) -> str | None:
        """How hard the model should think; `none`: not at all."""
        return self.reasoning.effort if self.reasoning else None

    @cached_property
    def constraints(self) -> dict[str, Grammar]:
        """Each field that constrains the answer, and its grammar."""
        form = self.text and self.text.format
        own = {"text": form.grammar} if isinstance(form, FlatSchema | JsonObject) else {}
        return own | super().constraints

    def conversation(self) -> Conversation:
        """Return the conversation without the protocol.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        choice, effort = self.tool_choice, self.effort
        named = choice.name if isinstance(choice, NamedTool) else None
        return conversation(
            self._messages(),
            _FIELD,
            self.tools,
            "required" if isinstance(choice, NamedTool) else choice,
            named,
            parallel=self.parallel_tool_calls is not False,
            template_options={} if effort is None else {"enable_thinking": effort != "none"},
        )

    def _messages(self) -> list[Message]:
        """Return the messages for a chat template: the calls of one turn belong to one message."""
        messages: list[Message] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        thoughts = ""
        for item in self.input:
            last = messages[-1] if messages else {"role": ""}
            match item.type:
                case "message" if item.role == "assistant":
                    text = joined(item.required("content"), _FIELD)
                    messages.append(call_message(text, (), thoughts))
                case "message":
                    role = item.required("role").replace("developer", "system")
                    text = joined(item.required("content"), _FIELD)
                    messages.append({"role": role, "content": text})
                case "reasoning":
                    thoughts = joined(item.content or item.summary, _FIELD)
                    continue
                case "function_call":
                    call = tuple(item.required(name) for name in ("call_id", "name", "arguments"))
                    made = call_message("", [call], thoughts)
                    if last["role"] == "assistant":
                        last["tool_calls"] = last.get("tool_calls", []) + made["tool_calls"]
                    else:
                        messages.append(made)
                case "function_call_output":
                    text = joined(item.required("output"), _FIELD)
                    messages.append(result_message(item.required("call_id"), text))
                case other:
                    message = f"this server has no items of the type {other[:64]!r}"
                    raise InvalidField(_FIELD, message, code="unsupported_parameter")
            thoughts = ""
        if not messages:
            raise InvalidField(_FIELD, "there is no message in it")
        return messages


class ResponsesUsage(BaseModel):
    """Tokens in and out."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class Response(BaseModel):
    """The answer, and the request's options."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]] = Field(description="items: message, reasoning, function_call")
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: dict[Literal["effort", "summary"], str | None]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
