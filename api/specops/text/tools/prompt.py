"""Brings a conversation with tools into the form that a model's chat template takes.

Most templates take tools in the form of `transformers`. Phi's template reads them from the system
message. A template without tools gets tools, calls and results as plain text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specops.text.tools.formats import GENERIC, Tool, ToolFormat

_PHI_SYSTEM = "You are a helpful assistant with some tools."  # from its model card
_INTRODUCTION = (
    "You can call functions. To call one, answer with nothing but JSON of this form:\n"
    '{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}\n'
    "After that you are told what it returned. The functions are:\n"
)
Messages = list[dict[str, Any]]


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], calls: ToolFormat
) -> tuple[Messages, list[dict[str, Any]] | None]:
    """Return messages and tools for a template.

    Args:
        messages: messages in OpenAI's form, with the arguments of calls as objects.
        tools: the tools that the model may call.
        calls: the template's format of calls.
    """
    told = [tool.for_template() for tool in tools]
    plain = [dict(message) for message in messages]
    if calls is GENERIC:
        plain = _as_text(plain)
        if tools:
            listed = "\n".join(json.dumps(item["function"], ensure_ascii=False) for item in told)
            plain = _with_system(plain, _INTRODUCTION + listed)
        return plain, None
    if calls.name == "phi" and tools:
        if plain[0]["role"] != "system":
            plain.insert(0, {"role": "system", "content": _PHI_SYSTEM})
        listed = json.dumps([item["function"] for item in told], ensure_ascii=False)
        plain[0]["tools"] = listed
    return plain, told or None


def _with_system(messages: Messages, text: str) -> Messages:
    """Add a text to the system message, or insert such a message."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
    return [first, *messages[1:]]


def _as_text(messages: Messages) -> Messages:
    """Turn calls into text of the assistant, and results into text of the user.

    The results of one turn become one message.
    """
    told: Messages = []
    names: dict[str, str] = {}
    for message in messages:
        if message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id", ""), "the function")
            text = f"{name} returned:\n{message['content']}"
            if told and told[-1].get("results"):
                told[-1]["content"] += f"\n\n{text}"
            else:
                told.append({"role": "user", "content": text, "results": True})
        elif calls := message.get("tool_calls"):
            names |= {call.get("id", ""): call["function"]["name"] for call in calls}
            written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            text = "\n".join([*([message["content"]] if message["content"] else []), *written])
            told.append({"role": message["role"], "content": text})
        else:
            told.append(message)
    return told
