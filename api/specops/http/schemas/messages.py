"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from specops.http.errors import InvalidField
from specops.http.schemas.conversation import (
    Conversation,
    Message,
    Parameters,
    ToolChoice,
    ToolName,
    Typed,
    call_message,
    not_text,
    result_message,
    with_names,
)
from specops.http.schemas.options import Body, EngineOptions, StopString, Text
from specops.text.tools.formats import Tool

_FIELD = "messages"


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
    input: dict[str, Any] | None = Field(None, description="of the tool that is called")
    tool_use_id: Text | None = Field(None, description="of the call that this is the result of")
    content: Text | list[ContentBlock] | None = Field(None, description="of a result")
    is_error: bool | None = None

    def said(self) -> str:
        """The text of a block that has nothing else."""
        if self.type != "text":
            raise not_text(self.type, _FIELD)
        return str(self.required("text"))

    def result(self) -> Message:
        """What a tool returned."""
        text = _said(self.content or "")
        return result_message(self.required("tool_use_id"), text)


class Turn(Body):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[ContentBlock], Field(fail_fast=True)]

    def messages(self) -> list[Message]:
        """What chat templates take: results are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = [block for block in self.content if block.type != "redacted_thinking"]
        results = [block.result() for block in blocks if block.type == "tool_result"]
        rest = [block for block in blocks if block.type != "tool_result"]
        if self.role != "assistant":
            said = _said(rest)
            told: Message = {"role": self.role, "content": said}
            return [*results, told] if said or not results else results
        calls = [
            (block.required("id"), block.required("name"), block.required("input"))
            for block in rest
            if block.type == "tool_use"
        ]
        thoughts = [block.thinking or "" for block in rest if block.type == "thinking"]
        said = _said([block for block in rest if block.type not in ("tool_use", "thinking")])
        return [*results, call_message(said, calls, "".join(thoughts))]


class MessagesTool(Body):
    """What the model may call; tools with a `type` but `custom` are Anthropic's own."""

    without_effect = frozenset({"cache_control"})

    name: ToolName
    type: Text | None = None
    description: Text | None = None
    input_schema: Parameters | None = None
    strict: bool | None = Field(False, description="arguments follow the schema")


class Choice(Body):
    """Whether tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = Field(None, description="where `type` is `tool`")
    disable_parallel_tool_use: bool | None = False


class Thinking(Body):
    """Whether a model that can think does."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="accepted and without effect")


class TokensRequest(Body):
    """A conversation, to be counted or gone on with."""

    model: str = Field(description="as GET /v1/models tells")
    messages: list[Turn] = Field(min_length=1, fail_fast=True)
    system: Text | Annotated[list[ContentBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True)] | None = Field(
        None, description="functions that the model may call; Anthropic's own are skipped"
    )
    tool_choice: Choice | None = None
    thinking: Thinking | None = None

    def conversation(self, **fields: Any) -> Conversation:
        """What is asked, without the protocol.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        messages = [message for turn in self.messages for message in turn.messages()]
        if system := _said(self.system or ""):
            messages.insert(0, {"role": "system", "content": system})
        chosen = self.tool_choice
        match chosen:
            case Choice(type="tool", name=None):
                raise InvalidField("tool_choice", "name the tool", code="missing_parameter")
            case Choice(type="tool", name=name):
                choice = ToolChoice("required", name)
            case Choice(type="any"):
                choice = ToolChoice("required")
            case Choice(type="none"):
                choice = ToolChoice("none")
            case _:
                choice = ToolChoice()
        tools = self.tools or ()
        own = [tool for tool in tools if tool.type in (None, "custom")]
        options = {"enable_thinking": self.thinking.type != "disabled"} if self.thinking else {}
        return Conversation(
            messages=with_names(messages),
            source=_FIELD,
            parallel=not (chosen and chosen.disable_parallel_tool_use),
            template_options=options,
            **fields,
            **choice.apply(
                (
                    Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))
                    for tool in own
                ),
                (tool.type for tool in tools if tool not in own and tool.type),
            ),
        )


class MessagesRequest(TokensRequest, EngineOptions):
    """A conversation that the assistant goes on with."""

    without_effect = frozenset(
        {"metadata", "service_tier", "container", "context_management", "mcp_servers"}
    )

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[StopString], Field(max_length=4)] | None = None
    stream: bool | None = Field(False, description="server-sent events")
    temperature: float | None = Field(1.0, ge=0, le=2, description="0: always the likeliest token")
    top_p: float | None = Field(1.0, gt=0, le=1)

    def conversation(self, **fields: Any) -> Conversation:
        """What is asked, without the protocol."""
        sampling = self.drawn(self.temperature, self.top_p)
        return super().conversation(
            limit=self.max_tokens,
            sampling=lambda _: sampling,
            stops=tuple(self.stop_sequences or ()),
            stream=bool(self.stream),
            **fields,
        )


class TokensResponse(BaseModel):
    """How long a conversation's prompt is."""

    input_tokens: int


class MessagesUsage(BaseModel):
    """Tokens in and out."""

    input_tokens: int = Field(description="of the prompt, but for those in the cache")
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = Field(description="computed for an earlier request")


class MessagesResponse(BaseModel):
    """The assistant's turn."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]] = Field(description="blocks: text, thinking, tool_use")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


def _said(content: str | list[ContentBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.said() for block in content)
