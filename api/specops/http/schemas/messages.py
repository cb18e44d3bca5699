"""Bodies of Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from specops.http.errors import InvalidField
from specops.http.schemas.body import Body, FreeObject, Text
from specops.http.schemas.constraints import json_grammar
from specops.http.schemas.conversation import (
    Conversation,
    Message,
    Mode,
    Parameters,
    ToolName,
    Typed,
    call_message,
    conversation,
    not_text,
    result_message,
)
from specops.http.schemas.options import MOST_STOPS, EngineOptions, StopString
from specops.request import Grammar
from specops.text.tools.formats import Tool

_FIELD = "messages"
_MODES: dict[str, Mode] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "required",
}


class ContentBlock(Typed):
    """A part of a turn: text, thoughts, a call of a tool or its result."""

    without_effect = frozenset({"cache_control", "citations", "signature"})
    source, called = _FIELD, "a block"

    type: str = Field(
        json_schema_extra={
            "enum": ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
        }
    )
    text: Text | None = None
    thinking: Text | None = None
    id: Text | None = Field(None, description="of a call")
    name: ToolName | None = Field(None, description="of the tool that is called")
    input: FreeObject | None = Field(None, description="of the tool that is called")
    tool_use_id: Text | None = Field(None, description="of the call that this is the result of")
    content: Text | Annotated[list[ContentBlock], Field(fail_fast=True)] | None = Field(
        None, description="of a result"
    )
    is_error: bool | None = None

    def only_text(self) -> str:
        """Return the block's text; a block of another type is refused."""
        if self.type != "text":
            raise not_text(self.type, _FIELD)
        return str(self.required("text"))


class Turn(Body):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[ContentBlock], Field(fail_fast=True)]

    def messages(self) -> list[Message]:
        """Return the messages for a chat template: results are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = [block for block in self.content if block.type != "redacted_thinking"]
        results = [
            result_message(block.required("tool_use_id"), _text(block.content))
            for block in blocks
            if block.type == "tool_result"
        ]
        rest = [block for block in blocks if block.type != "tool_result"]
        if self.role != "assistant":
            text = _text(rest)
            turn: Message = {"role": self.role, "content": text}
            return [*results, turn] if text or not results else results
        calls = [
            (block.required("id"), block.required("name"), block.required("input"))
            for block in rest
            if block.type == "tool_use"
        ]
        thoughts = [block.thinking or "" for block in rest if block.type == "thinking"]
        text = _text([block for block in rest if block.type not in ("tool_use", "thinking")])
        return [*results, call_message(text, calls, "".join(thoughts))]


class MessagesTool(Body):
    """A tool that the model may call; a `type` other than `custom` is one of Anthropic's own."""

    without_effect = frozenset({"cache_control"})

    name: ToolName
    type: Text | None = None
    description: Text | None = None
    input_schema: Parameters | None = None
    strict: bool | None = Field(False, description="arguments follow the schema")

    def tool(self) -> Tool | None:
        """Return the function, or None for one of Anthropic's own tools."""
        if self.type not in (None, "custom"):
            return None
        return Tool(self.name, self.description or "", self.input_schema, bool(self.strict))


class Choice(Body):
    """Whether tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = Field(None, description="where `type` is `tool`")
    disable_parallel_tool_use: bool | None = False


class Thinking(Body):
    """Whether a model thinks, if it can."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="accepted and without effect")


class TokensRequest(Body):
    """A conversation to count the tokens of, or to continue."""

    model: str = Field(description="as GET /v1/models tells")
    messages: list[Turn] = Field(min_length=1, fail_fast=True)
    system: Text | Annotated[list[ContentBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True)] | None = Field(
        None, description="functions that the model may call; Anthropic's own are skipped"
    )
    tool_choice: Choice | None = None
    thinking: Thinking | None = None

    def conversation(self) -> Conversation:
        """Return the conversation without the protocol.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        messages = [message for turn in self.messages for message in turn.messages()]
        if system := _text(self.system):
            messages.insert(0, {"role": "system", "content": system})
        choice = self.tool_choice or Choice(type="auto", name=None)
        if choice.type == "tool" and choice.name is None:
            raise InvalidField("tool_choice", "name the tool", code="missing_parameter")
        return conversation(
            messages,
            _FIELD,
            self.tools,
            _MODES[choice.type],
            choice.name if choice.type == "tool" else None,
            parallel=not choice.disable_parallel_tool_use,
            template_options={"enable_thinking": self.thinking.type != "disabled"}
            if self.thinking
            else {},
        )


class Format(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: FreeObject = Field(alias="schema")


class OutputConfig(Body):
    """How the model answers."""

    without_effect = frozenset({"effort"})

    format: Format | None = None


class MessagesRequest(TokensRequest, EngineOptions):
    """A conversation that the assistant continues."""

    without_effect = frozenset(
        {"metadata", "service_tier", "container", "context_management", "mcp_servers"}
    )

    limit_field = "max_tokens"

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None

    output_config: OutputConfig | None = None
    output_format: Format | None = Field(None, description="older form of `output_config.format`")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(self.stop_sequences or ())

    @cached_property
    def constraints(self) -> dict[str, Grammar]:
        """Each field that constrains the answer, and its grammar."""
        own = {}
        if self.output_config and (form := self.output_config.format):
            own["output_config"] = json_grammar(form.json_schema)
        if self.output_format:
            own["output_format"] = json_grammar(self.output_format.json_schema)
        return own | super().constraints


class TokensResponse(BaseModel):
    """The length of a conversation's prompt."""

    input_tokens: int


class MessagesUsage(BaseModel):
    """Tokens in and out."""

    input_tokens: int = Field(description="tokens of the prompt that were not in the cache")
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = Field(description="computed for an earlier request")


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessagesResponse(BaseModel):
    """The assistant's turn."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]] = Field(description="blocks: text, thinking, tool_use")
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessagesUsage


def _text(content: str | list[ContentBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.only_text() for block in content)
