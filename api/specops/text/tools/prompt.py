"""Rewrites a conversation with tools into a form that a model's chat template shows.

Parts that the template supports stay as they are. Parts that it would drop or refuse are rewritten:
calls become the assistant's text in the model's format, results the user's text, and tools and
system messages move to messages that the template shows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any

from specops.text.tools.formats import GENERIC, Tool, ToolFormat

_PHI_SYSTEM = "You are a helpful assistant with some tools."  # from its model card
_INTRODUCTION = (
    "You can call functions. To call one, answer with nothing but JSON of this form:\n"
    '{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}\n'
    "After that you are told what it returned. The functions are:\n"
)
AS_TEXT = "functions"  # `TemplateTraits.tools` of Firefunction's template, which expects JSON
IN_SYSTEM = "system"  # `TemplateTraits.tools` of a template that reads a field of that message
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")  # the only ids that Mistral's templates accept
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template shows of a conversation, according to `probe`.

    Attributes:
        calls: the format in which the model writes calls.
        tools: the variable in which the template reads tools, or `IN_SYSTEM`; empty: nowhere.
        system: shows a system message at the beginning.
        several_systems: shows several of them, at the beginning and after the user's messages.
        shows_calls: shows a message with one call, and its result.
        several_calls: shows messages with several calls.
        text_with_calls: shows the text of messages with calls.
        text_behind: shows such a text after the calls and their results, but keeps the order of
            two consecutive messages of the assistant.
        orphan_results: shows results of calls that no earlier message has.
        any_id: accepts call ids as other servers write them.
        arguments_as_text: accepts a call's arguments only as JSON.
        consecutive_roles: shows two consecutive messages of one role.
        needs_tools: shows calls and results only if there are tools.
        in_parts: only shows contents that are lists of parts, as vision models' templates do.
    """

    calls: ToolFormat = GENERIC
    tools: str = ""
    system: bool = True
    several_systems: bool = True
    shows_calls: bool = False
    several_calls: bool = False
    text_with_calls: bool = False
    text_behind: bool = False
    orphan_results: bool = False
    any_id: bool = True
    arguments_as_text: bool = False
    consecutive_roles: bool = True
    needs_tools: bool = False
    in_parts: bool = False

    def fallback(self) -> TemplateTraits:
        """Return the traits that turn any conversation into alternating texts."""
        return replace(self, shows_calls=False, orphan_results=False, consecutive_roles=False)


def for_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], traits: TemplateTraits
) -> tuple[Messages, dict[str, Any]]:
    """Return the messages and additional variables for a template.

    Args:
        messages: messages in OpenAI's form, with calls' arguments as objects.
        tools: the tools that the model may call.
        traits: the template's.
    """
    if traits.needs_tools and not tools:
        traits = replace(traits, shows_calls=False, orphan_results=False)
    complete = _results_in_order([_complete(message) for message in messages])
    if traits.text_behind:
        complete = [part for message in complete for part in _text_first(message)]
    plain = _with_calls(complete, traits)
    if not traits.several_systems:
        plain = _first_systems_joined(plain)
    described = [tool.for_template() for tool in tools]
    variables: dict[str, Any] = {}
    if tools and not traits.tools:
        listed = "\n".join(json.dumps(item["function"], ensure_ascii=False) for item in described)
        plain = _with_system(plain, _INTRODUCTION + listed)
    elif tools:
        variables["tools"] = described
        if traits.tools == IN_SYSTEM:
            if plain[0]["role"] != "system":
                plain.insert(0, {"role": "system", "content": _PHI_SYSTEM})
            listed = json.dumps([item["function"] for item in described], ensure_ascii=False)
            plain[0] = plain[0] | {"tools": listed}
        else:
            variables[traits.tools] = described
        if traits.tools == AS_TEXT:
            variables[AS_TEXT] = json.dumps(described, indent=4, ensure_ascii=False)
    if not (traits.system and traits.several_systems and traits.consecutive_roles):
        plain = _systems_to_user(plain, keep_first=traits.system)
    if not traits.consecutive_roles:
        plain = _merged(plain)
    return (in_parts(plain) if traits.in_parts else plain), variables


def in_parts(messages: Messages) -> Messages:
    """Write each content as a list of one part: its text."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def _complete(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with content, and reasoning under both names that transformers uses."""
    reasoning = message.get("reasoning_content")
    named = {} if reasoning is None else {"thinking": reasoning}
    return {**named, **message, "content": message.get("content") or ""}


def _results_in_order(messages: Messages) -> Messages:
    """Put results in the order of their calls: most templates show results without ids.

    Agents that call several tools at once send results as they arrive.
    """
    ordered: Messages = []
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        run = list(group)
        if are_results and ordered:
            calls = ordered[-1].get("tool_calls") or ()
            places = {call.get("id"): place for place, call in enumerate(calls)}
            run.sort(key=lambda result: places.get(result.get("tool_call_id"), len(places)))
        ordered += run
    return ordered


def _text_first(message: dict[str, Any]) -> Messages:
    """Move a message's text into a message before its calls; the reasoning stays with it."""
    if not (message.get("tool_calls") and message["content"]):
        return [message]
    first = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
    return [first, calls]


def _with_system(messages: Messages, text: str) -> Messages:
    """Add a text to the system message, or insert such a message."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    first = messages[0] | {"content": _joined(messages[0]["content"], text)}
    return [first, *messages[1:]]


def _first_systems_joined(messages: Messages) -> Messages:
    """Join the leading system messages, of which Codex sends several."""
    first = list(takewhile(lambda message: message["role"] == "system", messages))
    if len(first) <= 1:
        return messages
    text = _joined(*(message["content"] for message in first))
    return [first[0] | {"content": text}, *messages[len(first) :]]


def _systems_to_user(messages: Messages, *, keep_first: bool) -> Messages:
    """Turn system messages into user messages, merged with the next user message."""
    plain: Messages = []
    waiting = ""
    for index, message in enumerate(messages):
        if message["role"] == "system" and not (keep_first and not index):
            waiting = _joined(waiting, message["content"])
        elif waiting and message["role"] == "user":
            plain.append(message | {"content": _joined(waiting, message["content"])})
            waiting = ""
        else:
            if waiting:
                plain.append({"role": "user", "content": waiting})
                waiting = ""
            plain.append(message)
    return [*plain, {"role": "user", "content": waiting}] if waiting else plain


def _merged(messages: Messages) -> Messages:
    """Merge consecutive texts of one role."""
    plain: Messages = []
    for message in messages:
        last = plain[-1] if plain else {}
        mergeable = message["role"] in ("user", "assistant") and not message.get("tool_calls")
        if mergeable and last.get("role") == message["role"] and not last.get("tool_calls"):
            plain[-1] = last | {"content": _joined(last["content"], message["content"])}
        else:
            plain.append(message)
    return plain


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


# -- calls and results -----------------------------------------------------------------------------


def _with_calls(messages: Messages, traits: TemplateTraits) -> Messages:
    """Rewrite the calls and results that the template does not show."""
    plain: Messages = []
    names: dict[str, str] = {}
    shown: set[str] = set()  # ids of calls that the template shows
    texts = False  # whether the last message is results as text
    for message in _single_calls(messages, traits):
        follows, texts = texts, False
        if message["role"] == "tool":
            call_id = message.get("tool_call_id", "")
            if (traits.shows_calls and call_id in shown) or traits.orphan_results:
                plain.append(message | {"tool_call_id": _id(call_id, traits)})
                continue
            name = message.get("name") or names.get(call_id, "the function")
            text = f"{name} returned:\n{message['content']}"
            if follows:
                plain[-1]["content"] += f"\n\n{text}"
            else:
                plain.append({"role": "user", "content": text})
            texts = True
        elif calls := message.get("tool_calls"):
            names |= {call.get("id", ""): call["function"]["name"] for call in calls}
            if _shows(message, traits):
                shown |= {call.get("id", "") for call in calls}
                plain.append(message | {"tool_calls": [_call(call, traits) for call in calls]})
            else:
                written = [
                    (call["function"]["name"], call["function"]["arguments"]) for call in calls
                ]
                said = [message["content"]] if message["content"] else []
                text = "\n".join([*said, traits.calls.write(written)])
                plain.append({"role": message["role"], "content": text})
        else:
            plain.append(message)
    return plain


def _shows(message: Mapping[str, Any], traits: TemplateTraits) -> bool:
    several = traits.several_calls or len(message["tool_calls"]) == 1
    return traits.shows_calls and several and (traits.text_with_calls or not message["content"])


def _single_calls(messages: Messages, traits: TemplateTraits) -> Iterable[dict[str, Any]]:
    """Split messages with several calls if the template shows only one call with its result."""
    queue = list(reversed(messages))
    while queue:
        message = queue.pop()
        calls = message.get("tool_calls") or ()
        single = message | {"tool_calls": calls[:1]}
        if len(calls) <= 1 or _shows(message, traits) or not _shows(single, traits):
            yield message
            continue
        results = []
        while queue and queue[-1]["role"] == "tool":
            results.append(queue.pop())
        for index, call in enumerate(calls):
            yield message | {"tool_calls": [call], "content": "" if index else message["content"]}
            own = [item for item in results if item.get("tool_call_id") == call.get("id")]
            yield from own
            results = [item for item in results if item not in own]
        yield from results


def _call(call: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    function = call["function"]
    if traits.arguments_as_text and not isinstance(function["arguments"], str):
        text = json.dumps(function["arguments"], ensure_ascii=False)
        function = function | {"arguments": text}
    return call | {"id": _id(call.get("id", ""), traits), "function": function}


def _id(call_id: str, traits: TemplateTraits) -> str:
    """Map a call's id to one that the template accepts; equal ids stay equal."""
    if traits.any_id or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
