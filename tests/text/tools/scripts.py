"""Templates and answers of each family of models: fifty answers for each format."""

import json
import random
from dataclasses import dataclass
from typing import Any

from specops.text.tools.formats import GENERIC, THINKING, Tool, ToolFormat

COUNT = 50
_KINDS = ("string", "number", "boolean", "null", "array", "object")
TOOLS = (
    Tool(
        "get_weather",
        "The weather.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                **{f"{kind}{index}": {"type": kind} for kind in _KINDS for index in range(3)},
            },
        },
    ),
    Tool("search.web-2", "", None),
)
# The formats of published templates.
BY_NAME = {
    "hermes": ToolFormat(
        opening="<tool_call>\n", between="\n</tool_call>\n<tool_call>\n", closing="\n</tool_call>"),
    "llama": ToolFormat(between="; ", arguments_key="parameters", other_marks=("<|python_tag|>",)),
    "mistral": ToolFormat(opening="[TOOL_CALLS][", between=", ", closing="]"),
    "mistral-args": ToolFormat(
        "named", opening="[TOOL_CALLS]", between="[TOOL_CALLS]", middle="[ARGS]"),
    "phi": ToolFormat(
        opening="<|tool_call|>[", between=", ", closing="]<|/tool_call|>",
        other_marks=("functools[",)),
    "granite": ToolFormat(
        opening="<|tool_call|>[", between=", ", closing="]", other_marks=("<tool_call>",)),
    "functionary": ToolFormat(
        "named", opening="<function=", between="</function><function=", closing="</function>",
        middle=">"),
    "kimi": ToolFormat(
        "named", opening="<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        between="<|tool_call_end|><|tool_call_begin|>functions.",
        closing="<|tool_call_end|><|tool_calls_section_end|>",
        middle=":\0<|tool_call_argument_begin|>"),
    "command-r7b": ToolFormat(
        opening="<|START_ACTION|>[\n    ", between=",\n    ", closing="\n]<|END_ACTION|>",
        lead='"tool_call_id": "\0", ', name_key="tool_name", arguments_key="parameters"),
    "qwen3-coder": ToolFormat(
        "tagged", opening="<tool_call>\n<function=",
        between="</function>\n</tool_call>\n<tool_call>\n<function=",
        closing="</function>\n</tool_call>", other_marks=("<function=",), middle=">\n",
        key_open="<parameter=", key_close=">\n", value_close="\n</parameter>\n"),
    "glm": ToolFormat(
        "tagged", opening="<tool_call>", between="</tool_call>\n<tool_call>",
        closing="</tool_call>", middle="\n", key_open="<arg_key>",
        key_close="</arg_key>\n<arg_value>", value_close="</arg_value>\n"),
    "minimax": ToolFormat(
        "tagged", opening='<minimax:tool_call>\n<invoke name="',
        between='</invoke>\n<invoke name="', closing="</invoke>\n</minimax:tool_call>",
        middle='">\n', key_open='<parameter name="', key_close='">',
        value_close="</parameter>\n"),
    "lfm": ToolFormat(
        "literal", opening="<|tool_call_start|>[", between="), ", closing=")]<|tool_call_end|>",
        middle="(", key_close="=", value_close=", "),
    "olmo": ToolFormat(
        "literal", opening="<function_calls>", between=")\n", closing=")</function_calls>",
        middle="(", key_close="=", value_close=", "),
    "gemma4": ToolFormat(
        "literal", opening="<|tool_call>call:", between="}<tool_call|><|tool_call>call:",
        closing="}<tool_call|>", middle="{", key_close=":", value_close=",", quote='<|"|>'),
    "json": GENERIC,
}  # fmt: skip
_TURNS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}CALLS<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_CALLS = """{% for call in m.tool_calls or [] %}{% set function = call.function %}
{{ OPENING if loop.first else BETWEEN }}BODY
{%- if loop.last %}{{ CLOSING }}{% endif %}{% endfor %}"""
_CALL = {
    "json": "{{ LEAD ~ function.name ~ ARGUMENTS ~ function.arguments | tojson }}}",
    "named": "{{ function.name ~ MIDDLE ~ function.arguments | tojson }}",
    "tagged": "{{ function.name ~ MIDDLE }}{% for key, value in function.arguments | items %}"
    "{{ KEY_OPEN ~ key ~ KEY_CLOSE }}{{ value if value is string else value | tojson }}"
    "{{ VALUE_CLOSE }}{% endfor %}",
    "literal": "{{ function.name ~ MIDDLE }}{% for key, value in function.arguments | items %}"
    "{{ key ~ KEY_CLOSE }}{{ QUOTE ~ value ~ QUOTE if value is string else value | tojson }}"
    "{{ VALUE_CLOSE if not loop.last }}{% endfor %}",
}
_TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}"


def _template(form: ToolFormat) -> str:
    """A template that writes calls in this format."""
    source = _CALLS.replace("BODY", _CALL[form.style])
    texts = {
        "LEAD": f'{{{form.lead}{json.dumps(form.name_key)}: "',
        "ARGUMENTS": f'", {json.dumps(form.arguments_key)}: ',
        **{name.upper(): getattr(form, name) for name in ("opening", "between", "closing")},
        **{name.upper(): getattr(form, name) for name in ("middle", "key_open", "key_close")},
        "VALUE_CLOSE": form.value_close,
        "QUOTE": form.quote,
    }
    for name, text in texts.items():
        shown = json.dumps(text).replace("\\u0000", '" ~ loop.index ~ "')
        source = source.replace(name, f"({shown})")
    return _TOLD + _TURNS.replace("CALLS", source)


TEMPLATES = {name: _template(form) for name, form in BY_NAME.items()}
TEMPLATES["llama"] = "{# <|start_header_id|> #}" + TEMPLATES["llama"]
TEMPLATES["mistral"] = TEMPLATES["mistral"].replace(
    "{% set function",
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    "{% set function",
)
# These describe tools, but leave out calls.
TEMPLATES["phi"] = (
    "{% if messages[0].tools %}<|tool|>{{ messages[0].tools }}<|/tool|>{% endif %}"
    "{# 'tools' in message #}" + _TURNS.replace("CALLS", "")
)
TEMPLATES["granite"] = "{# <|tool_call|> #}" + _TOLD + _TURNS.replace("CALLS", "")
TEMPLATES["json"] = _TURNS.replace("CALLS", "")


@dataclass(frozen=True)
class Script:
    """An answer and its parts."""

    answer: str
    text: str
    reasoning: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


def written(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Write calls as a model of this format does."""
    return form.write(calls)


def scripts(form: ToolFormat) -> list[Script]:
    """Make answers with and without text, reasoning, calls; they contain marks of all formats."""
    rng = random.Random(form.opening)
    words = ["Sure.", "<b>", "{", "}", '"', "\\", "größer", "[1]", "<tool", "</think", "日本", "\n"]
    words += ["functools", "</param", "<arg_key", "3", "null"]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.randint(1, 6))).strip()

    def value(kind: str, depth: int = 0) -> Any:
        kinds = _KINDS if depth < 3 else _KINDS[:4]
        several = range(rng.randint(0, 3))
        if kind == "array":
            return [value(rng.choice(kinds), depth + 1) for _ in several]
        if kind == "object":
            return {text(): value(rng.choice(kinds), depth + 1) for _ in several}
        simple = {"string": text, "number": rng.random, "boolean": lambda: True}
        return simple[kind]() if kind in simple else None

    def argument(index: int) -> tuple[str, Any]:
        kind = rng.choice(_KINDS)
        return f"{kind}{index}", value(kind)

    found = []
    for number in range(COUNT):
        calls: list[tuple[str, dict[str, Any]]] = []
        while len(calls) < number % 4:
            tool = rng.choice(TOOLS)
            # Without JSON only the schema tells a text of digits from a number.
            most = 3 if form.style != "tagged" or tool.parameters else 0
            arguments = dict(argument(index) for index in range(rng.randint(0, most)))
            call = (tool.name, arguments)
            if call not in calls:  # a repeated one would end the answer
                calls.append(call)
        # Without an opening, calls are the whole answer.
        speaks = not calls or (number % 3 == 0 and not form.bare)
        said = f"I say: {text()}".strip() if speaks else ""
        thought = text() if number % 5 == 0 else ""
        reasoning = f"{THINKING[0][0]}\n{thought}\n{THINKING[0][1]}\n\n" if thought else ""
        between = "\n" if said and calls else ""
        answer = reasoning + said + between + (written(form, calls) if calls else "")
        found.append(Script(answer, said, thought, tuple(calls)))
    return found
