"""The conversation in a request of /v1/responses: its items, and its functions' names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from specops.http.answering.prompt import (
    Content,
    Message,
    Parameters,
    Part,
    TaggedPart,
    ToolName,
    call_message,
    joined,
    placeholder,
    result_message,
    written,
)
from specops.http.answering.schema import Body, FreeObject, Items, Text, Tools, known_fields
from specops.http.errors import InvalidField
from specops.text.json_values import dumps
from specops.text.tools.formats import MAX_NAME, Tool

FIELD = "input"
# Calls whose results the client sends: the field with the arguments, and a built-in tool's name.
_CALLS = {
    "function_call": ("arguments", ""),
    "custom_tool_call": ("input", ""),
    "mcp_call": ("arguments", ""),
    "local_shell_call": ("action", "local_shell"),
    "shell_call": ("action", "shell"),
    "apply_patch_call": ("operation", "apply_patch"),
}
_RESULTS = tuple(f"{kind}_output" for kind in _CALLS if kind != "mcp_call")
_REFERENCE = "item_reference"
Anything = Annotated[Any, AfterValidator(written)]


class Item(TaggedPart):
    """A message, reasoning, a tool call or its result.

    Other servers' work (web searches, code execution, image generation) is left out.
    """

    ignored_fields = frozenset({"status", "encrypted_content", "phase", "caller"})
    source, called = FIELD, "an item"

    type: str = Field(
        "message",
        description="the server reads message, reasoning, item_reference, and calls and results "
        "of functions, custom tools, shells, patches and MCP; others are left out",
    )
    id: Text | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: Text | None = None
    name: Text | None = None
    namespace: Text | None = Field(None, description="the called function's namespace")
    arguments: Anything = Field(None, description="JSON")
    input: Text | None = Field(None, description="a custom tool's input")
    action: FreeObject | None = Field(None, description="a shell's action")
    operation: FreeObject | None = Field(None, description="the operation of `apply_patch`")
    output: Anything = Field(None, description="a tool's output: a text, or a list of parts")
    summary: Items[Part] | None = None

    @property
    def kind(self) -> str:
        """The item's type; OpenAI's clients may leave it out of a reference."""
        return _REFERENCE if self.model_fields_set == {"id"} else self.type

    @property
    def refers(self) -> bool:
        """Whether this refers to an item of an earlier answer."""
        return self.kind == _REFERENCE

    def call(self) -> tuple[str, str, Any]:
        """Return the id, the name and the arguments of a call."""
        field, name = _CALLS[self.type]
        value = self.required(field)
        arguments = {"input": value} if field == "input" else value
        call_id = self.call_id or self.id or self.required("call_id")
        return call_id, name or self.required("name"), arguments

    def result(self, ignored: list[str]) -> str:
        """Return the text of a tool's result, with placeholders for parts that are not text."""
        if self.output is None or isinstance(self.output, str):
            return self.output or ""
        parts = self.output if isinstance(self.output, list) else [self.output]
        texts = []
        for part in parts:
            match part:
                case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
                    texts.append(text)
                case {"type": str(kind)}:
                    ignored.append(f"{FIELD}.{kind}")
                    texts.append(placeholder(kind))
                case _:  # a shell's output, with its exit code
                    texts.append(dumps(part).decode())
        return "".join(texts)


class ResponsesTool(Body):
    """A tool that the model may call: a function, or a namespace of functions."""

    type: Text
    name: ToolName | None = None
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(None, description="arguments follow the schema")
    tools: Tools[ResponsesTool] | None = Field(None, description="a namespace's tools")

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

    def echoed(self) -> dict[str, Any]:
        """Return the tool for the answer: the client's fields, and a function's required ones."""
        sent = {
            name: value
            for name, value in known_fields(self).items()
            if name in self.model_fields_set
        }
        if self.tools is not None:
            sent["tools"] = [tool.echoed() for tool in self.tools]
        if self.type == "function":
            sent = {"description": None, "parameters": None, **sent, "strict": bool(self.strict)}
        return sent


class FunctionNames:
    """Names functions for the model, unambiguously: two namespaces may use the same name.

    Attributes:
        tools: all tools by these names, including those of namespaces.
        sent: by such a name, the namespace and the name that the client knows.
    """

    def __init__(self, tools: Iterable[ResponsesTool]) -> None:
        found: list[tuple[str, ResponsesTool]] = []
        for tool in tools:
            if tool.type == "namespace":
                found += [(tool.name or "", each) for each in tool.tools or ()]
            else:
                found.append(("", tool))
        count = Counter(tool.name for _, tool in found)
        self.tools: list[ResponsesTool] = []
        self.sent: dict[str, tuple[str, str]] = {}
        self._called: dict[tuple[str, str], str] = {}
        for namespace, tool in found:
            name = tool.name
            if name and namespace and count[name] > 1:
                name = f"{namespace}__{name}"[-MAX_NAME:]
            self.tools.append(tool.model_copy(update={"name": name}))
            if name and tool.name:
                self.sent[name] = namespace, tool.name
                self._called[namespace, tool.name] = name

    def called(self, namespace: str | None, name: str) -> str:
        """Return the model's name of a function."""
        return self._called.get((namespace or "", name), name)


class History:
    """Turns items into messages; one turn's reasoning, text and calls form one message.

    Attributes:
        messages: for a chat template.
        ignored: the names of the items and parts left out.
    """

    def __init__(self, ignored: list[str], functions: FunctionNames) -> None:
        self.messages: list[Message] = []
        self.ignored = ignored
        self._functions = functions
        self._reasoning = ""

    def add(self, item: Item) -> None:
        """Add the next item."""
        match item.kind:
            case "reasoning":
                self._reasoning += joined(item.content or item.summary, FIELD, self.ignored)
                return
            case "message":
                self._message(item)
            case kind if kind in _CALLS:
                self._call(item)
            case kind if kind in _RESULTS:
                self._result(item.call_id or item.id or "", item)
            case kind:  # or a reference to an item that the server no longer has
                self.ignored.append(f"{FIELD}.{kind}")
                return
        self._reasoning = ""

    def _message(self, item: Item) -> None:
        role, content = item.required("role"), item.required("content")
        if role == "assistant":
            text = joined(content, FIELD, self.ignored)
            self.messages.append(call_message(text, (), self._reasoning))
        else:
            role = role.replace("developer", "system")
            self.messages.append({"role": role, "content": joined(content, FIELD)})

    def _call(self, item: Item) -> None:
        call_id, name, arguments = item.call()
        call = call_id, self._functions.called(item.namespace, name), arguments
        last = self.messages[-1] if self.messages else {"role": ""}
        made = call_message("", [call], self._reasoning)
        if last["role"] == "assistant":
            last["tool_calls"] = last.get("tool_calls", []) + made["tool_calls"]
        else:
            self.messages.append(made)
        if item.type == "mcp_call" and item.output is not None:
            self._result(call_id, item)

    def _result(self, call_id: str, item: Item) -> None:
        self.messages.append(result_message(call_id, item.result(self.ignored)))
