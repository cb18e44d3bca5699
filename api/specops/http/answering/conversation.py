"""The conversation that a chat request of any protocol is turned into.

The protocols differ in how they write messages, tools and the choice among them. Each request body
turns itself into a `Conversation`. The code after that does not know the protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import Field

from specops.http.answering.body import Body, FreeObject, Items, Text
from specops.http.errors import InvalidField
from specops.text.agents import strip_billing_header
from specops.text.json_values import loads, writable
from specops.text.tools.formats import TOOL_NAME, Tool

Message = dict[str, Any]  # in the form that chat templates read
ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME}$")]
Parameters = Annotated[FreeObject, Field(description="JSON schema of the arguments")]
Mode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages to answer, and the tools that the answer may call.

    Attributes:
        messages: in the form that chat templates read.
        source: name of the request's field with the messages, for errors.
        tools: the tools that the prompt describes.
        ignored: names of tools and parts that this server does not have, and of what
            `strip_billing_header` removed; they are reported like unknown fields.
        required: the answer must be a call.
        callable: names of the tools that may be called; None: all.
        parallel: an answer may have several calls.
        before: tokens of an earlier conversation, with its answer, that goes on with the messages.
        asks: the prompt ends with what begins the answer.
        truncates: the oldest messages may be left out where all of them are too long.
        template_options: more variables for the chat template.
        max_reasoning_tokens: most tokens of reasoning; None: as many as an answer may have.
        inline_reasoning: reasoning stays in the answer's text, tags included.
    """

    messages: Sequence[Message]
    source: str
    tools: tuple[Tool, ...] = ()
    ignored: tuple[str, ...] = ()
    required: bool = False
    callable: frozenset[str] | None = None
    parallel: bool = True
    before: tuple[int, ...] = ()
    asks: bool = True
    truncates: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)
    max_reasoning_tokens: int | None = None
    inline_reasoning: bool = False


class ToolChoice(NamedTuple):
    """Whether tools are called, and which of them may be.

    Attributes:
        mode: whether they may be called or must be; None: they may.
        allowed: names of those that may be called, of all that the prompt describes; None: all.
        once: an answer has one call at most.
    """

    mode: Mode | None = None
    allowed: Sequence[str] | None = None
    once: bool = False


class Reasoning(Body):
    """Whether a model thinks, if it can, and how long."""

    ignored_fields = frozenset({"summary", "generate_summary", "exclude", "enabled"})

    effort: str | None = Field(None, description="`none` turns it off; else without effect")
    max_tokens: int | None = Field(None, ge=0, description="most tokens of reasoning")


def thinks_at(effort: str | None) -> bool | None:
    """Return whether a model thinks where the client wants this effort; None: as it likes."""
    return None if effort is None else effort != "none"


class AnyTool(Protocol):
    """A tool as a protocol writes it."""

    @property
    def type(self) -> str | None:
        """The type of the tool; a function is `function`, or what the protocol calls it."""

    def tool(self) -> Tool | None:
        """Return the function, or None where this server has no tools of that type."""


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
            raise InvalidField(
                "tools",
                "a tool of the type 'function' needs a `function`",
                code="missing_parameter",
            )
        return Tool(own.name, own.description or "", own.parameters, bool(own.strict))


_ANY = ToolChoice()


def conversation(
    messages: list[Message],
    source: str,
    tools: Iterable[AnyTool] | None = None,
    choice: ToolChoice = _ANY,
    *,
    thinks: bool | None = None,
    ignored: Iterable[str] = (),
    template_options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Conversation:
    """Build a conversation from the parts that a protocol's request has.

    Args:
        messages: in the form that chat templates read.
        source: name of the request's field with the messages.
        tools: the request's tools.
        choice: which of them may be called, or must be.
        thinks: whether the model thinks, if it can; None: as it likes.
        ignored: names of the parts that the messages are without.
        template_options: more variables for the chat template.
        fields: other fields of `Conversation`.

    Raises:
        InvalidField: two tools have one name, or the tool that must be called is missing.
    """
    mode, allowed, once = choice
    known = [(tool.type, tool.tool()) for tool in tools or ()]
    offered = tuple(tool for _, tool in known if tool and mode != "none")
    names = {tool.name for tool in offered}
    if len(names) < len(offered):
        raise InvalidField("tools", "two tools have the same name")
    if mode == "required" and not offered:
        raise InvalidField("tool_choice", "a call is required, but there are no tools to call")
    for name in allowed or ():
        if name not in names:
            raise InvalidField("tool_choice", f"there is no tool {name[:64]!r}")
    kept, removed = strip_billing_header(_with_names(messages))
    return Conversation(
        messages=kept,
        source=source,
        tools=offered,
        ignored=(
            *dict.fromkeys(f"tools.{kind}" for kind, tool in known if tool is None),
            *dict.fromkeys(ignored),
            *removed,
        ),
        required=mode == "required",
        callable=None if allowed is None else frozenset(allowed),
        parallel=not once,
        template_options=({} if thinks is None else {"enable_thinking": thinks})
        | dict(template_options or {}),
        **fields,
    )


def _with_names(messages: list[Message]) -> list[Message]:
    """Add to results the names of the tools that were called: some templates write them."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


# The last two are OpenAI's reasoning.
_TEXTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")


class Part(Body):
    """A part of a message: a text. Pictures, sound and files are refused by their name."""

    type: str = Field(
        description="text, input_text, output_text or refusal; others are left out of answers and "
        "results, and refused in questions"
    )
    text: Text | None = None
    refusal: Text | None = None


Content = Text | Items[Part]


def joined(
    content: str | Sequence[Part] | None,
    source: str,
    ignored: list[str] | None = None,
    *,
    result: bool = False,
) -> str:
    """Return the text of a message.

    Args:
        content: of the message; None: it is empty.
        source: the body's field, for errors.
        ignored: of an answer or a tool's result: gets the names of the parts that are no texts,
            which are left out. Clients send what an agent has seen and done with every request. To
            refuse a part of it would end the conversation for good.
        result: a word stands for such a part, so that the model knows of it.

    Raises:
        InvalidField: a part of a question is not a text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if ignored is None or part.type in _TEXTS:
            texts.append(_text(part, source))
            continue
        ignored.append(f"{source}.{part.type}")
        if result:
            texts.append(placeholder(part.type))
    return "\n".join(texts)  # as llama-server and vLLM do


def written(value: Any) -> Any:
    """Return a value of a client; one that cannot be written into texts is refused."""
    return writable({"": value})[""]


def placeholder(kind: str) -> str:
    """Return the text that a model reads instead of a part of a result that is not text."""
    return f"[{kind[:64]}: not shown, this model reads text only]"


def _text(part: Part, source: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in _TEXTS:
        raise not_text(part.type, source)
    if text is None:
        raise InvalidField(source, f"a part of the type {part.type!r} has no text")
    return text


class TaggedPart(Body):
    """A part of a conversation whose `type` says which other fields it has.

    Attributes:
        source: name of the request's field with the messages, for errors.
        called: the protocol's word for such a part.
    """

    source: ClassVar[str]
    called: ClassVar[str]
    type: str

    def required(self, name: str) -> Any:
        """Return the value of a field that every part of this type has.

        Raises:
            InvalidField: the field is missing.
        """
        if (value := getattr(self, name)) is None:
            message = f"{self.called} of the type {self.type!r} has no {name}"
            raise InvalidField(self.source, message, code="missing_parameter")
        return value


def not_text(kind: str, source: str) -> InvalidField:
    """Return the error of a part that is not a text."""
    message = f"this server reads text only, but a part is {kind[:64]!r}"
    return InvalidField(source, message, code="unsupported_parameter")


def call_message(text: str, calls: Sequence[tuple[str, str, Any]], reasoning: str = "") -> Message:
    """Return a turn of the assistant, in the form that chat templates read.

    Args:
        text: what the assistant said.
        calls: id, name and arguments of each call; arguments are an object, or its JSON.
        reasoning: what the assistant thought.
    """
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
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
    """Return a tool's result, in the form that chat templates read.

    Args:
        call_id: id of the call.
        text: what the tool returned.
        name: of the tool; None: templates are not told.
    """
    message = {"role": "tool", "content": text, "tool_call_id": call_id}
    return message if name is None else message | {"name": name}


def _arguments(arguments: Any) -> Any:
    """Return arguments as an object for the template; a text that is not JSON stays a text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return loads(arguments or "{}")
    except ValueError:
        return arguments
