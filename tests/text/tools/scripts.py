"""Templates and answers of each family of models: fifty answers for each format."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from specops.text.tools.formats import FORMATS, GENERIC, THINKING, Tool, ToolFormat

BY_NAME = {item.name: item for item in (*FORMATS, GENERIC)}
COUNT = 50
TOOLS = (
    Tool("get_weather", "The weather.", {"type": "object", "properties": {"city": {}}}),
    Tool("search.web-2", "", None),
)
_TURNS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
CALL{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
_CALL = """{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}"""
_TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}"


def _template(form: str, told: str = _TOLD, key: str = "arguments") -> str:
    return told + _TURNS.replace("CALL", form.replace("JSON", _CALL.replace("KEY", key)))


# Short forms of the published templates, with the signs of their formats.
TEMPLATES = {
    "hermes": _template("<tool_call>\nJSON\n</tool_call>"),
    "llama": "<|start_header_id|>" + _template("JSON", key="parameters"),
    "mistral": _template(
        "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
        "[TOOL_CALLS][JSON]"
    ),
    "mistral-args": _template(
        "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    ),
    "phi": _template(
        "<|tool_call|>[JSON]<|/tool_call|>",
        "{% if messages[0].tools %}<|tool|>{{ messages[0].tools }}<|/tool|>{% endif %}",
    ),
    "granite": _template("<|tool_call|>[JSON]"),
    "json": _TURNS.replace("CALL", ""),
}


@dataclass(frozen=True)
class Script:
    """An answer and its parts."""

    answer: str
    text: str
    reasoning: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


def written(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Write calls as a model of this format does."""
    if form.named:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls)
    items = [
        json.dumps({"name": name, form.arguments: args}, ensure_ascii=False) for name, args in calls
    ]
    if form.listed:
        return f"{form.openings[0]} [{', '.join(items)}]{form.closing}"
    if form.bare:
        return form.separator.join(items)
    return form.separator.join(f"{form.openings[0]}\n{item}\n{form.closing}" for item in items)


def scripts(form: ToolFormat) -> list[Script]:
    """Make answers with and without text, thoughts and calls; they contain marks of all formats."""
    rng = random.Random(form.name)
    words = ["Sure.", "<b>", "{", "}", '"', "\\", "größer", "[1]", "<tool", "</think", "日本", "\n"]
    words.append("functools")

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 6))).strip()

    def value(depth: int = 0) -> Any:
        kinds = [text, rng.random, lambda: None, lambda: True, lambda: -3]
        if depth < 3:
            kinds.append(lambda: [value(depth + 1) for _ in range(rng.randint(0, 3))])
            kinds.append(lambda: {text(): value(depth + 1) for _ in range(rng.randint(0, 3))})
        return rng.choice(kinds)()

    found = []
    for number in range(COUNT):
        calls: list[tuple[str, dict[str, Any]]] = []
        while len(calls) < number % 4:
            arguments = {f"a{place}": value() for place in range(rng.randint(0, 3))}
            call = (rng.choice(TOOLS).name, arguments)
            if call not in calls:  # a repeated one would end the answer
                calls.append(call)
        # Without an opening, calls are the whole answer.
        speaks = not calls or (number % 3 == 0 and not form.bare)
        said = f"I say: {text()}".strip() if speaks else ""
        thought = text() if number % 5 == 0 else ""
        thoughts = f"{THINKING[0][0]}\n{thought}\n{THINKING[0][1]}\n\n" if thought else ""
        between = "\n" if said and calls else ""
        answer = thoughts + said + between + (written(form, calls) if calls else "")
        found.append(Script(answer, said, thought, tuple(calls)))
    return found
