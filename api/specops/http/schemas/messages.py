"""Bodies of Anthropic's POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
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
    unread,
)
from specops.http.schemas.options import EngineOptions, StopList
from specops.request import Grammar
from specops.text.tools.formats import Tool

_FIELD = "messages"
_MODES: dict[str, Mode] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "required",
}


# What Anthropic's own servers run: the calls, and what they brought.
_SERVERS = re.compile(r"\w+_tool_(use|result)|container_upload|tool_reference")


class ContentBlock(Typed):
    """A part of a turn: text, thoughts, a call of a tool or its result.

    What an answer has of other kinds was written by another server, and is left out.
    """

    without_effect = frozenset({"cache_control", "citations", "signature", "context"})
    source, called = _FIELD, "a block"

    type: str = Field(
        description="text, document (of text), search_result, tool_use, tool_result, thinking or "
        "redacted_thinking; others are left out of answers, and refused in questions"
    )
    text: Text | None = None
    thinking: Text | None = None
    id: Text | None = Field(None, description="of a call")
    name: Text | None = Field(None, description="of the tool that is called")
    input: FreeObject | None = Field(None, description="of the tool that is called")
    tool_use_id: Text | None = Field(None, description="of the call that this is the result of")
    content: Text | Annotated[list[ContentBlock], Field(fail_fast=True)] | None = Field(
        None, description="of a result"
    )
    is_error: bool | None = None
    title: Text | None = Field(None, description="of a document or a search result")
    origin: FreeObject | Text | None = Field(
        None, alias="source", description="of a document: its text; of a search result: its address"
    )

    def only_text(self) -> str:
        """Return the block's text.

        Raises:
            InvalidField: it has none.
        """
        match self.type:
            case "text":
                return str(self.required("text"))
            case "search_result":
                text = _text(self.required("content"))
                return "\n".join(filter(None, (self.title, str(self.origin or ""), text)))
            case "compaction":  # a summary of what was said before
                return _text(self.content)
            case "document" if (data := _document(self.origin)) is not None:
                return f"{self.title}\n{data}" if self.title else data
        raise not_text(self.type, _FIELD)

    def result_text(self, left_out: list[str]) -> str:
        """Return the text of a tool's result; what is no text has a word in its place."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = []
        for block in self.content:
            if block.has_text:
                texts.append(block.only_text())
            else:
                left_out.append(f"{_FIELD}.{block.type}")
                texts.append(unread(block.type))
        return "\n".join(texts)

    @property
    def has_text(self) -> bool:
        """Whether this is a kind of block that a model reads as text."""
        readable = self.type == "document" and _document(self.origin) is not None
        return readable or self.type in ("text", "search_result", "compaction")


def _document(origin: Any) -> str | None:
    """Return the text of a document; None of a file."""
    if not isinstance(origin, dict):
        return None
    match origin:
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return text
        case {"type": "content", "content": [*parts]}:
            texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
            whole = [text for text in texts if isinstance(text, str)]
            return "\n".join(whole) if len(whole) == len(parts) else None
    return None


class Turn(Body):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[ContentBlock], Field(fail_fast=True)]

    def messages(self, left_out: list[str]) -> list[Message]:
        """Return the messages for a chat template: results are messages of their own.

        Args:
            left_out: gets the names of blocks that are left out of them.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = [block for block in self.content if block.type != "redacted_thinking"]
        results = [
            result_message(block.required("tool_use_id"), block.result_text(left_out))
            for block in blocks
            if block.type == "tool_result"
        ]
        rest = []
        for block in blocks:
            if self._is_left_out(block):
                left_out.append(f"{_FIELD}.{block.type}")
            elif block.type != "tool_result":
                rest.append(block)
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

    def _is_left_out(self, block: ContentBlock) -> bool:
        if self.role == "assistant":
            known = ("tool_use", "tool_result", "thinking")
            return not (block.has_text or block.type in known)
        return block.type != "tool_result" and _SERVERS.fullmatch(block.type) is not None


class MessagesTool(Body):
    """A tool that the model may call; a `type` other than `custom` is one of Anthropic's own."""

    without_effect = frozenset({"cache_control"})

    name: ToolName | None = Field(None, description="Anthropic's toolsets have none")
    type: Text | None = None
    description: Text | None = None
    input_schema: Parameters | None = None
    strict: bool | None = Field(False, description="arguments follow the schema")

    def tool(self) -> Tool | None:
        """Return the function, or None for one of Anthropic's own tools.

        Raises:
            InvalidField: the function's name is missing.
        """
        if self.type not in (None, "custom"):
            return None
        if self.name is None:
            raise InvalidField("tools", "a tool has no name", code="missing_parameter")
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
        left_out: list[str] = []
        messages = [message for turn in self.messages for message in turn.messages(left_out)]
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
            left_out=left_out,
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
        {
            *("metadata", "service_tier", "container", "context_management", "mcp_servers"),
            *("cache_control", "inference_geo", "speed", "user_profile_id", "diagnostics"),
            *("betas", "fallbacks", "fallback_credit_token"),
        }
    )

    limit_field = "max_tokens"

    max_tokens: int = Field(ge=1)
    stop_sequences: StopList | None = None

    output_config: OutputConfig | None = None
    output_format: Format | None = Field(None, description="older form of `output_config.format`")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(filter(None, self.stop_sequences or ()))

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
