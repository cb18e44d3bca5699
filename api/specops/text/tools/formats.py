"""The table of tool-call formats, and which of them a model's chat template was written for.

Families were trained to write calls in a form of their own, always JSON with something around it:

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, again for each call
    llama        {"name": ..., "parameters": {...}}, maybe behind <|python_tag|>; more after `; `
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    mistral-args [TOOL_CALLS]name[ARGS]{...}, again for each call
    phi          <|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>
    granite      <|tool_call|>[{"name": ..., "arguments": {...}}, ...]
    json         {"name": ..., "arguments": {...}}, for models that were trained on none of these
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOOL_NAME = r"[a-zA-Z0-9_.:/-]{1,128}"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: matches `TOOL_NAME`.
        description: what it does, for the model.
        parameters: JSON schema of its arguments; None where the client gives none.
        strict: the arguments must follow the schema.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """What chat templates are given, as `transformers` writes it."""
        told: dict[str, Any] = {"name": self.name, "description": self.description}
        told["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": told}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls.

    Attributes:
        name: of the format.
        signs: what a template has that was written for it.
        openings: any of them begins calls; the first is what is written where calls are forced.
        closing: may end them.
        bare: calls also come without an opening, as the answer's beginning.
        listed: calls of one answer are one JSON array.
        separator: stands between calls that are not.
        arguments: the key of a call's arguments.
        named: the name stands before the arguments and `[ARGS]`, outside of JSON.
    """

    name: str
    signs: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()
    closing: str = ""
    bare: bool = False
    listed: bool = False
    separator: str = "\n"
    arguments: str = "arguments"
    named: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be special tokens, which are no text of an answer otherwise."""
        own = (*self.openings, self.closing, *((ARGS, CALL_ID) if self.named else ()))
        return tuple(marker for marker in own if marker)


ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
GENERIC = ToolFormat("json", bare=True)
# The first whose signs a template has is its format.
FORMATS = (
    ToolFormat(
        "mistral-args",
        ("[TOOL_CALLS]", ARGS),
        ("[TOOL_CALLS]",),
        separator="",
        named=True,
    ),
    ToolFormat("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), listed=True),
    ToolFormat(
        "phi",
        ("<|tool|>",),
        ("<|tool_call|>", "functools["),
        "<|/tool_call|>",
        listed=True,
    ),
    ToolFormat("granite", ("<|tool_call|>",), ("<|tool_call|>",), listed=True),
    ToolFormat("hermes", ("<tool_call>",), ("<tool_call>",), "</tool_call>"),
    ToolFormat(
        "llama",
        ("<|start_header_id|>", "tools"),
        ("<|python_tag|>",),
        bare=True,
        separator="; ",
        arguments="parameters",
    ),
)
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def format_of(template: str) -> ToolFormat:
    """The format that a chat template, as Jinja, was written for."""
    written = (item for item in FORMATS if all(sign in template for sign in item.signs))
    return next(written, GENERIC)


def thinking_of(template: str) -> tuple[str, str] | None:
    """The tags between which a model of this chat template thinks; None where it does not."""
    return next((tags for tags in THINKING if tags[1] in template), None)
