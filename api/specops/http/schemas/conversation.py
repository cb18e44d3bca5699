"""What a chat request of any protocol comes down to: a conversation, and how it goes on.

The protocols differ in how they write messages, tools and the choice among them. Each request turns
itself into a `Conversation`, and what follows knows no protocol.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from specops.http.errors import InvalidField
from specops.http.schemas.options import Body, Text
from specops.request import SamplingParams
from specops.text.tools.formats import TOOL_NAME, Tool

_MESSAGE_SIZE, _TOOL_SIZE = 32, 512  # characters that a template adds, or would add in the time
Message = dict[str, Any]  # as chat templates take it
ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME}$")]
Parameters = Annotated[dict[str, Any], Field(description="JSON schema of the arguments")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages to answer, with what may be called, and how the answer is drawn.

    Attributes:
        messages: as chat templates take them.
        source: the request's field that has them, for errors.
        limit: the most tokens that the client wants; None: as many as the server gives.
        sampling: how the tokens of one of the choices are drawn.
        tools: that the model is told about.
        skipped: names of tools that this server does not have; they are as good as unknown fields.
        required: the answer must be a call.
        named: of this tool, where it is set.
        parallel: an answer may have several calls.
        template_options: more for the chat template.
    """

    messages: Sequence[Message]
    source: str
    limit: int | None = None
    sampling: Callable[[int], SamplingParams] = lambda _: SamplingParams()
    tools: tuple[Tool, ...] = ()
    skipped: tuple[str, ...] = ()
    required: bool = False
    named: str | None = None
    parallel: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    choices: int = 1
    stops: tuple[str, ...] = ()
    stream: bool = False
    logprobs: int | None = None

    @property
    def size(self) -> int:
        """Characters, of which rendering and encoding take time, roughly."""
        told = sum(_MESSAGE_SIZE + len(message["content"]) for message in self.messages)
        return told + _TOOL_SIZE * len(self.tools)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools may be called: the answer's part of every protocol's `tool_choice`."""

    mode: Literal["auto", "none", "required"] = "auto"
    named: str | None = None

    def apply(self, tools: Iterable[Tool], skipped: Iterable[str]) -> dict[str, Any]:
        """Return a conversation's fields.

        Raises:
            InvalidField: a call is wanted, and there is no such tool.
        """
        offered = tuple(tools) if self.mode != "none" else ()
        names = {tool.name for tool in offered}
        if len(names) < len(offered):
            raise InvalidField("tools", "two of them have the same name")
        if self.mode == "required" and not offered:
            raise InvalidField("tool_choice", "a call is required, but there are no tools to call")
        if self.named is not None and self.named not in names:
            raise InvalidField("tool_choice", f"there is no tool {self.named!r}")
        return {
            "tools": offered,
            "skipped": tuple(dict.fromkeys(f"tools.{name}" for name in skipped)),
            "required": self.mode == "required",
            "named": self.named,
        }


class Part(Body):
    """A part of a message: a text. Pictures, sound and files are refused by their name."""

    type: str = Field(json_schema_extra={"enum": ["text", "input_text", "output_text", "refusal"]})
    text: Text | None = None
    refusal: Text | None = None


Content = Text | Annotated[list[Part], Field(fail_fast=True)]


def joined(content: str | Sequence[Part] | None, field: str) -> str:
    """The text of a message.

    Raises:
        InvalidField: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text(part, field) for part in content)


def _text(part: Part, field: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "input_text", "output_text", "refusal", "summary_text"):
        raise not_text(part.type, field)
    if text is None:
        raise InvalidField(field, f"a part of the type {part.type!r} has no text")
    return text


class Typed(Body):
    """A part of a conversation whose `type` says which of its fields it has.

    Attributes:
        source: the request's field that has it, for errors.
        called: what the protocol calls it.
    """

    source: ClassVar[str]
    called: ClassVar[str]
    type: str

    def required(self, name: str) -> Any:
        """The value of a field that one of this type has.

        Raises:
            InvalidField: it has none.
        """
        if (value := getattr(self, name)) is None:
            message = f"{self.called} of the type {self.type!r} has no {name}"
            raise InvalidField(self.source, message, code="missing_parameter")
        return value


def not_text(kind: str, field: str) -> InvalidField:
    """Return the refusal of a part that is no text."""
    message = f"this server reads texts only, a part is {kind[:64]!r}"
    return InvalidField(field, message, code="unsupported_parameter")


def call_message(text: str, calls: Sequence[tuple[str, str, Any]], thoughts: str = "") -> Message:
    """The assistant's turn, as chat templates take it.

    Args:
        text: what it said.
        calls: id, name and arguments of each call, these as an object or as JSON.
        thoughts: what it thought.
    """
    message: Message = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": _arguments(arguments)},
            }
            for call_id, name, arguments in calls
        ]
    return message


def result_message(call_id: str, text: str, name: str | None = None) -> Message:
    """What a tool returned, as chat templates take it."""
    message = {"role": "tool", "content": text, "tool_call_id": call_id}
    return message if name is None else message | {"name": name}


def with_names(messages: list[Message]) -> list[Message]:
    """Results with the names of the tools that were called: some templates write them."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


def _arguments(given: Any) -> Any:
    """Templates write objects as JSON; what is no JSON they get as it is."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given or "{}")
    except (ValueError, RecursionError):
        return given
