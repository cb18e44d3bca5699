"""Defines tools and the formats of tool calls, and writes calls in a format.

Each family of models was trained to write calls in one format. `probe` learns it from the chat
template's rendering of a known call. All known formats have one of four styles, and marks around
them:

    json     <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
    named    [TOOL_CALLS]NAME[ARGS]{...}
    tagged   <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    literal  <|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>

An answer's calls are `opening`, the first call, `between`, the second call and so on, `closing`.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

MAX_NAME = 128
TOOL_NAME = rf"[a-zA-Z0-9_.:/-]{{1,{MAX_NAME}}}"
WILDCARD = "\0"  # in a format's texts: an id or a number that differs for each call
_TAG = r"<[^\s<>]*>|\[[A-Z_/]+\]"  # may be one token
_PARTS = re.compile(rf"\s+|({_TAG}|{WILDCARD})")
_BARE_KEY = re.compile(r"[\w.$/-]+( [\w.$/-]+)*")  # needs no marks around it (`literal`)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: matches `TOOL_NAME`.
        description: describes the function to the model.
        parameters: JSON schema of the arguments; None if the client sent none.
        strict: whether the arguments must follow the schema.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """Return the tool as `transformers` passes it to chat templates."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes calls.

    Attributes:
        style: the form of a call; see the module.
        opening: text before the first call; empty: calls are the whole answer.
        between: text between two calls.
        closing: text after the last call.
        other_marks: other marks with which some models begin calls.
        name_key: JSON key of the function's name (`json`).
        arguments_key: JSON key of the arguments (`json`).
        lead: text before the name's key in a call (`json`).
        middle: text between the name and what follows it (all but `json`).
        key_open: text before an argument's name (`tagged`).
        key_close: text between an argument's name and its value (`tagged`, `literal`).
        value_close: text after an argument's value (`tagged`), or between two (`literal`).
        quote: mark around texts (`literal`); `"`: texts and other values are Python literals.
    """

    style: Literal["json", "named", "tagged", "literal"] = "json"
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    other_marks: tuple[str, ...] = ()
    name_key: str = "name"
    arguments_key: str = "arguments"
    lead: str = ""
    middle: str = ""
    key_open: str = ""
    key_close: str = ""
    value_close: str = ""
    quote: str = '"'

    @property
    def bare(self) -> bool:
        """Whether calls come without an opening, at the beginning of an answer."""
        return not self.opening

    @property
    def mark(self) -> str:
        """The opening's first mark: an answer that contains it has calls."""
        return next(iter(parts(self.opening)), "")

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks with which calls may begin, `mark` first."""
        return tuple(mark for mark in (self.mark, *self.other_marks) if mark)

    @property
    def tags(self) -> tuple[str, ...]:
        """Marks that may be special tokens and must stay in the answer's text."""
        texts = [self.opening, self.between, self.closing, self.middle, *self.other_marks]
        return tags_in(*texts, self.key_open, self.key_close, self.value_close, self.quote)

    @property
    def marked(self) -> bool:
        """Whether the format encloses texts in special marks (`literal`)."""
        return self.quote != '"'

    @property
    def quotes(self) -> tuple[str, ...]:
        """The marks that may enclose a text (`literal`)."""
        return (self.quote,) if self.marked else ('"', "'")

    @property
    def end(self) -> str:
        """The character that ends a call's arguments (`literal`)."""
        return self.closing[:1]

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Write calls, given as names and arguments, in this format."""
        texts = [self._call(name, arguments) for name, arguments in calls]
        pieces = [self.opening + texts[0], *(self.between + text for text in texts[1:])]
        numbered = (text.replace(WILDCARD, str(index)) for index, text in enumerate(pieces))
        return "".join(numbered) + self.closing

    def _call(self, name: str, arguments: Any) -> str:
        if self.style == "json":
            head = f"{{{self.lead}{json.dumps(self.name_key)}: {json.dumps(name)}, "
            return f"{head}{json.dumps(self.arguments_key)}: {_json(arguments)}}}"
        if self.style == "named":
            return f"{name}{self.middle}{_json(arguments)}"
        named = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        if self.style == "literal":
            written = (f"{key}{self.key_close}{self.literal(item)}" for key, item in named.items())
            return f"{name}{self.middle}{self.value_close.join(written)}"
        return f"{name}{self.middle}" + "".join(
            f"{self.key_open}{key}{self.key_close}"
            f"{value if isinstance(value, str) else _json(value)}{self.value_close}"
            for key, value in named.items()
        )

    def inner_key(self, key: str) -> str:
        """Write an object's key within a call's arguments (`literal` with marks)."""
        return key if _BARE_KEY.fullmatch(key) else self.literal(key)

    def literal(self, value: Any) -> str:
        """Write an argument's value (`literal`)."""
        if not self.marked:
            return _json(value) if isinstance(value, str | list | dict) else repr(value)
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, list):
            return f"[{self.value_close.join(map(self.literal, value))}]"
        if isinstance(value, dict):
            items = (f"{self.inner_key(key)}:{self.literal(item)}" for key, item in value.items())
            return f"{{{self.value_close.join(items)}}}"
        return _json(value)


GENERIC = ToolFormat()
"""The format for models that were trained on none, or on an unknown one."""
# The formats of families whose templates describe tools, but leave out calls. The first whose sign
# occurs in the template counts.
_UNSHOWN = (
    (
        "<|tool|>",  # Phi-4-mini
        ToolFormat(
            opening="<|tool_call|>[",
            between=", ",
            closing="]<|/tool_call|>",
            other_marks=("functools[",),
        ),
    ),
    (
        "<|tool_call|>",  # Granite 3; some versions write the other mark
        ToolFormat(
            opening="<|tool_call|>[", between=", ", closing="]", other_marks=("<tool_call>",)
        ),
    ),
    (
        "<tool_call>",  # SmolLM3
        ToolFormat(
            opening="<tool_call>\n",
            between="\n</tool_call>\n<tool_call>\n",
            closing="\n</tool_call>",
        ),
    ),
    *(
        (
            sign,
            ToolFormat(
                "literal",
                opening="<|tool_call_start|>[",
                between="), ",
                closing=")]<|tool_call_end|>",
                middle="(",
                key_close="=",
                value_close=", ",
            ),
        )
        for sign in ("<|tool_list_start|>", "List of tools: [")  # LFM2 and LFM2.5
    ),
)
THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),  # Gemma 4
)


def unshown_format(template: str) -> ToolFormat:
    """Return the format of a template that shows no calls, by the signs in its source."""
    return next((form for sign, form in _UNSHOWN if sign in template), GENERIC)


def reasoning_tags_of(template: str) -> tuple[str, str] | None:
    """Return the tags around a model's reasoning, by its template; None if there are none."""
    return next((tags for tags in THINKING if tags[1] in template), None)


def tags_in(*texts: str) -> tuple[str, ...]:
    """Return the marks in the texts that may be special tokens."""
    return tuple(dict.fromkeys(tag for text in texts for tag in re.findall(_TAG, text)))


def parts(text: str) -> list[str]:
    """Split a format's text at white space and around tags: "<a>\\nb=" becomes "<a>", "b="."""
    return [part for part in _PARTS.split(text) if part]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
