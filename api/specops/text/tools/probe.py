"""Finds out which parts of a conversation a chat template shows, and how its model writes calls.

Templates declare neither. So once per model, this renders short conversations with known words:
the words in the rendered text are shown, and the text around a known call is the model's format.
llama.cpp does the same (common/chat-diff-analyzer.cpp).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from specops.text.tools.formats import GENERIC, WILDCARD, Tool, ToolFormat, parts, unshown_format
from specops.text.tools.prompt import (
    AS_TEXT,
    IN_SYSTEM,
    Messages,
    TemplateTraits,
    for_template,
    in_parts,
)
from specops.text.tools.reader import AnswerReader

# Renders messages with additional variables; None if the template refuses them.
Render = Callable[[Messages, Mapping[str, Any]], str | None]
Call = tuple[str, dict[str, Any]]

_VARIABLES = ("tools", "xml_tools", AS_TEXT)  # in which templates expect tools
_TOOLS = tuple(
    Tool(
        name,
        "does it",
        {
            "type": "object",
            "properties": {
                "keyone": {"type": "string", "description": "one"},
                "keytwo": {"type": "integer", "description": "two"},
            },
            "required": ["keyone"],
        },
    )
    for name in ("probealpha", "probebeta")
)
_FIRST: Call = ("probealpha", {"keyone": "firstvalue", "keytwo": 73})
_SECOND: Call = ("probebeta", {"keyone": "secondvalue"})
_IDS = ("probecal1", "probecal2")  # Mistral's templates need nine characters
_ASKED = {"role": "user", "content": "askedword"}
_SAID, _SYSTEM, _LATER = "saidword", "systemword", "laterword"
_RESULT, _RESULT2 = "resultword", "otherresult"
_THOUGHTS = re.compile(r"\s*(?:<[^<>]*think[^<>]*>\s*)*", re.IGNORECASE)
_OPEN_TAG = re.compile(r"[<\[][^>\]\s]*$")
# Turns with calls may end differently from those without: the text after the last </...>.
_TURN_END = re.compile(r"(</[^<>]*>)(?!.*</).*$", re.DOTALL)
_TAG_END = re.compile(r"[^<\[\s]*[>\]]")


def traits_of(source: str, render: Render) -> TemplateTraits:
    """Return a template's traits.

    Args:
        source: the template, in Jinja.
        render: renders it.
    """
    if _shows_only_parts(render):
        shown = traits_of(source, lambda messages, values: render(in_parts(messages), values))
        return replace(shown, in_parts=True)
    traits = _without_tools(render)
    if traits is None:  # the template refuses even a question; its error message says why
        return TemplateTraits()
    tools = next(
        (variable for variable in _tool_variables(source) if _shows_tools(render, variable)), ""
    )
    if not tools:
        return traits
    traits = replace(traits, tools=tools)
    return _with_calls(source, render, traits)


def _shows_only_parts(render: Render) -> bool:
    question = str(_ASKED["content"])
    if _holds(render([_ASKED], {}), question):
        return False
    return _holds(render(in_parts([_ASKED]), {}), question)


def _without_tools(render: Render) -> TemplateTraits | None:
    values: dict[str, Any] = {}
    if (asked := render([_ASKED], values)) is None:
        values["tools"] = [tool.for_template() for tool in _TOOLS]  # some require tools
        asked = render([_ASKED], values)
    if asked is None:
        return None
    shows_user = _ASKED["content"] in asked  # some leave the first message out
    with_system = render([{"role": "system", "content": _SYSTEM}, _ASKED], values)
    again = render([{"role": "user", "content": _SYSTEM}, _ASKED], values)
    system = {"role": "system", "content": _SYSTEM}
    later = {"role": "system", "content": _LATER}
    # Claude Code sends one after the user's first message, Codex several at the beginning. Some
    # templates refuse these, or show only the last.
    several = ([system, _ASKED, later], [system, later, _ASKED])
    return TemplateTraits(
        system=with_system is not None and _SYSTEM in with_system,
        several_systems=all(_holds(render(each, values), _SYSTEM, _LATER) for each in several),
        consecutive_roles=again is not None and (_SYSTEM in again or not shows_user),
    )


def _tool_variables(source: str) -> Iterable[str]:
    yield from (name for name in _VARIABLES if name in source)
    if re.search(r"message\w*\s*(\.tools|\[.tools.\])", source) or "'tools' in message" in source:
        yield IN_SYSTEM


def _shows_tools(render: Render, variable: str) -> bool:
    text = _rendered(render, [_ASKED], TemplateTraits(tools=variable, system=True))
    return text is not None and all(tool.name in text for tool in _TOOLS) and "keyone" in text


def _rendered(render: Render, messages: Messages, traits: TemplateTraits) -> str | None:
    return render(*for_template(messages, _TOOLS, traits))


def _with_calls(source: str, render: Render, traits: TemplateTraits) -> TemplateTraits:
    lone = replace(traits, orphan_results=True)
    all_shown = replace(lone, shows_calls=True, several_calls=True, text_with_calls=True)
    learned = None
    seen = False
    for as_text in (False, True):  # some print a dictionary in Python's notation
        shown = replace(all_shown, arguments_as_text=as_text)
        text = _rendered(render, [_ASKED, _calls(_FIRST)], shown)
        if _all_in(text, _FIRST):
            seen = True
            learned = _learned(render, shown)
            if learned is not None or not _holds(text, str(_FIRST[1])):
                break
    if learned is None:
        unshown = GENERIC if seen else unshown_format(source)
        if unshown is GENERIC:
            return replace(traits, tools="")
        written = {"role": "assistant", "content": unshown.write([_FIRST])}
        orphan_results = _holds(_rendered(render, [_ASKED, written, _result(0)], lone), _RESULT)
        return replace(traits, calls=unshown, orphan_results=orphan_results)
    if "<|start_header_id|>" in source and learned.bare:  # Llama 3 may write this mark, too
        learned = replace(learned, other_marks=("<|python_tag|>",))
    single = [_ASKED, _calls(_FIRST), _result(0)]
    results = _holds(_rendered(render, single, shown), _RESULT)
    pair = [_ASKED, _calls(_FIRST, _SECOND), _result(0), _result(1, _RESULT2)]
    several = _rendered(render, pair, shown)
    with_text = _rendered(render, [_ASKED, _calls(_FIRST, said=_SAID), _result(0)], shown)
    cut = [_ASKED, {"role": "assistant", "content": _SAID}, _calls(_FIRST), _result(0)]
    text_shown = _all_in(with_text, _FIRST) and _holds(with_text, _SAID)
    behind = text_shown and not _in_order(with_text) and _in_order(_rendered(render, cut, shown))
    written = {"role": "assistant", "content": learned.write([_FIRST])}
    lone_text = _rendered(render, [_ASKED, written, _result(0)], shown)
    foreign = json.loads(json.dumps(single).replace(_IDS[0], "call_probe-1"))
    untold = render(*for_template(single, (), shown))
    return replace(
        traits,
        calls=learned,
        shows_calls=results,
        several_calls=_all_in(several, _FIRST, _SECOND) and _holds(several, _RESULT, _RESULT2),
        text_with_calls=text_shown,
        text_behind=behind,
        orphan_results=_holds(lone_text, _RESULT),
        any_id=_holds(_rendered(render, foreign, shown), _RESULT),
        arguments_as_text=as_text,
        needs_tools=not (_all_in(untold, _FIRST) and _holds(untold, _RESULT)),
    )


def _calls(*calls: Call, said: str = "") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": said,
        "tool_calls": [
            {"id": _IDS[index], "type": "function", "function": {"name": name, "arguments": values}}
            for index, (name, values) in enumerate(calls)
        ],
    }


def _result(index: int, text: str = _RESULT) -> dict[str, Any]:
    name = (_FIRST, _SECOND)[index][0]
    return {"role": "tool", "content": text, "tool_call_id": _IDS[index], "name": name}


def _holds(text: str | None, *words: str) -> bool:
    return text is not None and all(word in text for word in words)


def _in_order(text: str | None) -> bool:
    """Whether a message's text comes before its call, and the call before its result."""
    if not _holds(text, _SAID, _FIRST[0], _RESULT):
        return False
    _, _, after = str(text).rpartition(str(_ASKED["content"]))
    return after.find(_SAID) < after.find(_FIRST[0]) < after.find(_RESULT)


def _all_in(text: str | None, *calls: Call) -> bool:
    """Whether names and arguments occur in a text after the question."""
    if text is None:
        return False
    _, _, after = text.rpartition(str(_ASKED["content"]))
    words = [str(word) for name, values in calls for word in (name, *values, *values.values())]
    return _holds(after, *words)


# -- the format of calls ---------------------------------------------------------------------------


def _learned(render: Render, traits: TemplateTraits) -> ToolFormat | None:
    """Return the format in which the template writes calls; None if it has no known style."""
    texts = [
        _rendered(render, [_ASKED, message], traits)
        for message in (
            {"role": "assistant", "content": _SAID},
            _calls(_FIRST),
            _calls(_FIRST, _SECOND),
        )
    ]
    said, one, two = texts
    if said is None or one is None:
        return None
    start = len(_OPEN_TAG.sub("", _common(said, one)))
    end = _common(said[start:][::-1], one[start:][::-1])[::-1]
    if cut := _TAG_END.match(end):
        end = end[cut.end() :]
    pair = two if two is not None and _all_in(two, _FIRST, _SECOND) else None
    sections = [
        text[start : len(text) - len(end)] for text in (one, pair) if text and text.endswith(end)
    ]
    sections = [text[_THOUGHTS.match(text).end() :] for text in sections]  # type: ignore[union-attr]
    if not sections:
        return None
    for style in (_as_json, _as_named, _as_tagged, _as_literal):
        form = style(*sections)
        if form is not None and _reads_back(form, sections):
            return replace(form, closing=_TURN_END.sub(r"\1", form.closing))
    return None


def _reads_back(form: ToolFormat, sections: list[str]) -> bool:
    for calls, section in zip(([_FIRST], [_FIRST, _SECOND]), sections, strict=False):
        reader = AnswerReader(form, _TOOLS)
        # Text after the calls, such as the beginning of a tool's turn, does not belong to them.
        if (end := section.rfind(form.closing)) < 0:
            return False
        reader.push(section[: end + len(form.closing)])
        reader.finish()
        read = [(block.name, _loaded(block.text)) for block in reader.blocks]
        if read != calls:
            return False
    return True


def _as_json(one: str, two: str = "") -> ToolFormat | None:
    first = _object(one, _FIRST)
    if first is None:
        return None
    start, end, name_key, arguments_key = first
    lead, between = _lead(one, start, name_key), ""
    opening, closing = one[:start].lstrip(), one[end:].rstrip()
    second = _object(two, _SECOND) if two else None
    if second is not None:
        lead = _varying(lead, _lead(two, second[0], name_key))
        between = two[end : second[0]]
    elif not opening:
        between = "; "  # as Llama 3 separates calls
    else:
        between = f"{closing}\n{opening}"
    return ToolFormat(
        opening=opening,
        between=between,
        closing=closing,
        name_key=name_key,
        arguments_key=arguments_key,
        lead=lead,
    )


def _object(text: str, call: Call) -> tuple[int, int, str, str] | None:
    """Return a call's start and end as a JSON object, and its keys for name and arguments."""
    name, arguments = call
    index = text.find(name)
    while (index := text.rfind("{", 0, max(index, 0))) >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, index)
        except ValueError:
            continue
        argument_keys = [key for key, item in value.items() if item == arguments]
        if name in value.values() and argument_keys:
            name_key = next(key for key, item in value.items() if item == name)
            return index, end, name_key, argument_keys[0]
    return None


def _lead(text: str, start: int, name_key: str) -> str:
    lead = text[start + 1 : text.index(json.dumps(name_key), start)]
    return _without_ids(lead)


def _as_named(one: str, two: str = "") -> ToolFormat | None:
    first = _named(one, _FIRST)
    if first is None:
        return None
    start, middle, end = first[0], _without_ids(first[1]), first[2]
    opening, closing = _without_ids(one[:start].lstrip()), one[end:].rstrip()
    if not opening:
        return None
    between = closing + opening
    second = _named(two, _SECOND, end) if two else None
    if second is not None:
        between = _without_ids(two[end : second[0]])
        middle = _varying(middle, _without_ids(second[1]))
    return ToolFormat("named", opening=opening, between=between, closing=closing, middle=middle)


def _named(text: str, call: Call, after: int = 0) -> tuple[int, str, int] | None:
    """Return the start of a call's name, the text up to its JSON, and the end of its JSON."""
    name, arguments = call
    start = text.find(name, after)
    brace = text.find("{", start)
    if start < 0 or brace < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, brace)
    except ValueError:
        return None
    return (start, text[start + len(name) : brace], end) if value == arguments else None


def _as_tagged(one: str, two: str = "") -> ToolFormat | None:
    name = _FIRST[0]
    match = re.search(rf"(?s)^\s*(.+?){name}(.*?)keyone(.+?)firstvalue(.+?)keytwo(.+?)73(.*)$", one)
    if match is None:
        return None
    opening, before, key_close, after, key_close_again, rest = match.groups()
    tag = max(before.rfind("<"), before.rfind("["))
    key_open = before[tag:]
    if tag < 0 or key_close != key_close_again or not after.endswith(key_open):
        return None
    value_close = _common(after.removesuffix(key_open), rest)
    if not value_close.strip():
        return None
    closing = rest[len(value_close) :].rstrip()
    between = f"{closing}\n{opening}"
    again = re.search(rf"(?s)73{re.escape(value_close)}(.*?){_SECOND[0]}", two)
    if again is not None:
        between = again[1]
    return ToolFormat(
        "tagged",
        opening=_without_ids(opening),
        between=_without_ids(between),
        closing=closing,
        middle=before[:tag],
        key_open=key_open,
        key_close=key_close,
        value_close=value_close,
        # Qwen3-Coder leaves out the outer mark now and then.
        other_marks=tuple(part for part in parts(opening)[1:] if part.startswith("<function=")),
    )


def _as_literal(one: str, two: str = "") -> ToolFormat | None:
    match = re.search(
        rf"(?s)^\s*(\S*<.*?){_FIRST[0]}(\W)keyone([:=] ?)(\W+)firstvalue\4(\W+)keytwo\3 ?73(\W.*)$",
        one,
    )
    if match is None:
        return None
    opening, middle, key_close, quote, value_close, rest = match.groups()
    again = re.search(rf"(?s)73(.*?){_SECOND[0]}", two)
    between = again[1] if again is not None else f"{rest.rstrip()}\n{opening}"
    mark = parts(opening)[0]
    # The beginning of a tool's turn may follow the last call.
    closing = between[: between.index(mark)] if mark in between else rest
    return ToolFormat(
        "literal",
        opening=opening,
        between=between,
        closing=closing.rstrip(),
        middle=middle,
        key_close=key_close,
        value_close=value_close,
        quote='"' if quote in ("'", '"') else quote,
    )


def _common(one: str, other: str) -> str:
    """Return two texts' common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _without_ids(text: str) -> str:
    return re.sub("|".join(_IDS), WILDCARD, text)


def _varying(one: str, other: str) -> str:
    """Return a text, with its numbers as wildcards if the other call's text differs."""
    return one if other == one else re.sub(r"\d+", WILDCARD, one)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
