"""The table of tool-call formats, and the choice of one by the model's chat template.

Each family of models was trained to write calls in a form of its own, always JSON with marks around
it:

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, again for each call
    llama        {"name": ..., "parameters": {...}}, maybe after <|python_tag|>; the next after `; `
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    mistral-args [TOOL_CALLS]name[ARGS]{...}, again for each call
    phi          <|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>
    granite      <|tool_call|>[{"name": ..., "arguments": {...}}, ...]
    json         {"name": ..., "arguments": {...}}, for all other models
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
        description: what the function does, for the model.
        parameters: JSON schema of the arguments; None if the client gives none.
        strict: whether the arguments must follow the schema.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates get from `transformers`."""
        told: dict[str, Any] = {"name": self.name, "description": self.description}
        told["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": told}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes calls.

    Attributes:
        name: name of the format.
        signs: texts that every template of this format contains.
        openings: marks that begin calls. Forced calls begin with the first one.
        closing: mark that may end calls.
        bare: whether calls also come without an opening, at the beginning of an answer.
        listed: whether the calls of an answer are one JSON array.
        separator: text between calls that are not an array.
        arguments: JSON key of a call's arguments.
        named: whether the name stands outside of JSON, before `[ARGS]` and the arguments.
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
        """Marks that may be special tokens, so that they must be kept in the answer's text."""
        own = (*self.openings, self.closing, *((ARGS, CALL_ID) if self.named else ()))
        return tuple(marker for marker in own if marker)


ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
GENERIC = ToolFormat("json", bare=True)
# A template has the first format whose signs it contains.
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
    """Return the format that a chat template (as Jinja) was written for."""
    written = (item for item in FORMATS if all(sign in template for sign in item.signs))
    return next(written, GENERIC)


def thinking_of(template: str) -> tuple[str, str] | None:
    """Return the tags around the thoughts of a model with this template; None without thoughts."""
    return next((tags for tags in THINKING if tags[1] in template), None)
