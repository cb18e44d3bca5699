"""The grammar of answers that must call tools, or whose calls must follow a schema.

The grammar, in llguidance's dialect of Lark, writes calls in the format of the model's family. All
tokens except the values of arguments are forced, so they cost next to nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specops.request import Grammar, GrammarKind, ToolArguments
from specops.text.schemas.references import escaped
from specops.text.schemas.trial import enforced
from specops.text.tools.arguments import argument_schema, types_of
from specops.text.tools.formats import VARIES, Tool, ToolFormat, parts

# What may stand between thoughts and what follows: a poor model would write spaces without end.
_SPACE = r"SPACE: /\s{0,4}/"
Rule = str | ToolArguments  # as Lark has it, or of the JSON that a schema describes


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Writes the grammar of a model's answers.

    Args:
        calls: the model's format of calls.
        special: the tags that are special tokens, with their token ids.
        thinking: the tags around the model's thoughts; None if it does not think.
        begun: whether the prompt ends with the first of these tags.
    """

    calls: ToolFormat
    special: Mapping[str, int]
    thinking: tuple[str, str] | None
    begun: bool

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        required: bool,
        parallel: bool,
        text_grammar: Grammar | None = None,
    ) -> Grammar:
        """Return the grammar.

        Args:
            tools: the tools that may be called.
            required: the answer must be calls, after possible thoughts. Otherwise it may also be
                text, but a text that begins like a call must be one.
            parallel: whether the answer may have several calls.
            text_grammar: what the answer's text follows; then no text comes before calls.
        """
        formed = text_grammar is not None
        rules: list[Rule] = [f"start: {self._start(tools, required=required, formed=formed)}"]
        rules += self._call_rules(tools, parallel=parallel) if tools else []
        rules += self._thought_rules() if self.thinking else []
        if not required and not formed:
            rules += self._text_rules()
        text = "".join(f"{rule}\n" for rule in rules if isinstance(rule, str))
        arguments = tuple(rule for rule in rules if not isinstance(rule, str))
        said = None if required else text_grammar
        return Grammar(GrammarKind.LARK, text, said, arguments)

    def _start(self, tools: Sequence[Tool], *, required: bool, formed: bool) -> str:
        thoughts = "thoughts " if self.begun else "thoughts? " if self.thinking else ""
        if formed and not tools:
            return f"{thoughts}@said"
        if required or formed:
            calls = f"{self._literal(self.calls.mark)} calls"
            return thoughts + (calls if required else f"(@said | {calls})")
        opened = "calls" if self.calls.bare else f"before {self._rest()} calls"
        return f"{thoughts}(said | {opened})"

    def _rest(self) -> str:
        """Return the part of the opening that `_text_rules` have not put at the end of the text."""
        return self._literal(self.calls.mark) if self.calls.mark in self.special else ""

    def _text_rules(self) -> list[str]:
        """Return the rules of text: `said` is a text without calls, `before` one up to a call."""
        if self.calls.bare:
            return [r"said: SAID?", r"SAID: /[^{ \t\r\n](.|\n)*/"]
        if self.calls.mark in self.special:
            return ["said: TEXT", "before: TEXT", r"TEXT: /(.|\n)*/"]
        opening = _escaped(self.calls.mark)
        return [
            "said: SAID",
            rf"SAID: /(.|\n)*/ & ~/(.|\n)*{opening}(.|\n)*/",
            rf"before[lazy]: /(.|\n)*?{opening}/",
        ]

    def _thought_rules(self) -> list[str]:
        opening, closing = self.thinking or ("", "")
        first = "" if self.begun else self._literal(opening)
        if closing in self.special:
            return [
                f"thoughts: {first} THOUGHT {self._literal(closing)} SPACE",
                r"THOUGHT: /(.|\n)*/",
                _SPACE,
            ]
        return [
            f"thoughts: {first} thought SPACE",
            rf"thought[lazy]: /(.|\n)*?{_escaped(closing)}/",
            _SPACE,
        ]

    def _call_rules(self, tools: Sequence[Tool], *, parallel: bool) -> list[Rule]:
        """Return the rules of `calls`, which follow the mark of the opening."""
        form = self.calls
        opening = form.opening.removeprefix(form.mark)
        space = '" "? ' if opening.startswith("[") else ""  # Mistral's models write one
        calls = f"{space}{self._literal(opening)} call"
        if parallel:
            calls += f" ({self._literal(form.between)} call)*"
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        rules: list[Rule] = [f"calls: {calls} {self._literal(form.closing)}", f"call: {names}"]
        varies = any(
            VARIES in text for text in (form.opening, form.between, form.middle, form.lead)
        )
        rules += [r"varies: /[\w-]{1,40}/"] if varies else []
        for index, tool in enumerate(tools):
            rules += self._call_rule(f"_{index}", tool)
        return rules

    def _call_rule(self, suffix: str, tool: Tool) -> list[Rule]:
        form = self.calls
        if form.style == "tagged":
            return self._tagged_rules(suffix, tool)
        rules = [_arguments(f"args{suffix}", tool, _parameters(tool))]
        if form.style == "named":
            name = f"{json.dumps(tool.name)} {self._literal(form.middle)}"
            return [f"call{suffix}: {name} args{suffix}", *rules]
        # Cut at the tokens of JSON, because another JSON value may begin alike.
        name_key, name, key = map(json.dumps, (form.name_key, tool.name, form.arguments_key))
        head = [f"{json.dumps('{')} {self._literal(form.lead)}"]
        head += map(json.dumps, (name_key, ": ", name, ", ", key, ": "))
        return [f'call{suffix}: {" ".join(head)} args{suffix} "}}"', *rules]

    def _tagged_rules(self, suffix: str, tool: Tool) -> list[Rule]:
        """Return the rules of a call whose arguments have tags around them, in the schema's order.

        The length and the pattern of a text hold, other keywords of its schema do not.
        """
        form = self.calls
        schema = _parameters(tool)
        properties = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
        listed = schema["required"] if isinstance(schema.get("required"), list) else []
        required = [key for key in listed if isinstance(key, str)]
        order = sorted(properties, key=lambda key: key not in required)
        order += [key for key in required if key not in properties]
        arguments: list[str] = []
        rules: list[Rule] = []
        for index, key in enumerate(order):
            name = f"arg{suffix}_{index}"
            value = self._value_rule(name, tool, key, argument_schema(schema, key))
            opened = self._literal(f"{form.key_open}{key}{form.key_close}")
            rules += [f"{name}: {opened} {name}_value", *value]
            arguments.append(name if key in required else f"{name}?")
        if _is_open(schema):
            name = f"arg{suffix}_more"
            opened = f"{self._literal(form.key_open)} KEY{suffix} {self._literal(form.key_close)}"
            rules += [f"{name}: {opened} {name}_value", *self._value_rule(name, tool, "", {})]
            rules.append(rf"KEY{suffix}: /[\w.-]{{1,64}}/")
            arguments.append(f"{name}*")
        call = f"{json.dumps(tool.name)} {self._literal(form.middle)} {' '.join(arguments)}"
        return [f"call{suffix}: {call}", *rules]

    def _value_rule(self, name: str, tool: Tool, key: str, schema: Any) -> list[Rule]:
        """Return the rules of an argument's value and the tag that closes it."""
        close = self.calls.value_close
        types = types_of(schema)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices and types == {"string"}:
            written = " | ".join(json.dumps(str(choice)) for choice in choices)
            return [f"{name}_value: ({written}) {self._literal(close)}"]
        if types and "string" not in types:
            whole: dict[str, Any] = tool.parameters or {}
            shared = {word: whole[word] for word in whole.keys() & {"$defs", "definitions"}}
            path = f"/properties/{escaped(key)}"
            return [
                f"{name}_value: {name}_json {self._literal(close)}",
                _arguments(f"{name}_json", tool, {**shared, **schema}, path),
            ]
        mark = next(iter(parts(close)))
        before, after = close.split(mark, 1)
        body = _text_body(schema if types == {"string"} else {})
        if mark in self.special:
            text = f"{name.upper()}: /{body}{_escaped(before)}/"
            return [f"{name}_value: {name.upper()} {self._literal(mark + after)}", text]
        # The mark ends the text also where the model leaves out what should come before it. Else
        # the text would go on, while the reader has ended the call.
        before = f"({_escaped(before)})?" if before else ""
        return [
            f"{name}_value: {name}_text {self._literal(after)}",
            f"{name}_text[lazy]: /{body}{before}{_escaped(mark)}/",
        ]

    def _literal(self, text: str) -> str:
        """Return a text of a format for a rule, with its special tokens."""
        known = [VARIES, *self.special]
        pieces = re.split("(" + "|".join(map(re.escape, known)) + ")", text)
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def _piece(self, text: str) -> str:
        if text == VARIES:
            return "varies"
        token = self.special.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


def _text_body(schema: Mapping[str, Any]) -> str:
    """Return a regular expression of a text, without an end."""
    rules = {key: schema[key] for key in ("pattern", "minLength", "maxLength") if key in schema}
    if not enforced({"type": "string", **rules}):
        return r"(.|\n)*"
    if isinstance(pattern := rules.get("pattern"), str):
        return pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
    least, most = rules.get("minLength", 0), rules.get("maxLength", "")
    return rf"(.|\n){{{least},{most}}}" if least or most != "" else r"(.|\n)*"


def _arguments(rule: str, tool: Tool, schema: Mapping[str, Any], path: str = "") -> ToolArguments:
    return ToolArguments(rule, tool.name, json.dumps(schema), tool.strict, path)


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether a call may have arguments that its schema does not list."""
    joins = schema.keys() & {"allOf", "anyOf", "oneOf", "$ref"}
    free = "properties" not in schema and "additionalProperties" not in schema
    says = "patternProperties" in schema or schema.get("additionalProperties", False) is not False
    return bool(joins) or free or says


def _parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments; a tool without a schema takes none."""
    own: dict[str, Any] = {"properties": {}} if tool.parameters is None else tool.parameters
    return {"type": "object", **own}


def _escaped(text: str) -> str:
    """Escape a text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
