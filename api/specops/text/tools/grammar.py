"""The grammar of answers that must call tools, or whose calls must follow a schema.

The grammar, in llguidance's dialect of Lark, writes calls in the format of the model's family. All
tokens except the values of arguments are forced, so they cost next to nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specops.text.grammar import LAYOUT
from specops.text.tools.formats import ARGS, Tool, ToolFormat

# What may stand between thoughts and what follows: a poor model would write spaces without end.
_SPACE = r"SPACE: /\s{0,4}/"
# Keys with which a schema may list further arguments besides its own `properties`.
_OPEN = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}


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

    def lark(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool, formed: bool = False
    ) -> str:
        """Return the grammar.

        Args:
            tools: the tools that may be called.
            required: the answer must be calls, after possible thoughts. Otherwise it may also be
                text, but a text that begins like a call must be one.
            parallel: whether the answer may have several calls.
            formed: the answer's text follows the grammar `@said`, and no text comes before calls.
        """
        rules = [f"start: {self._start(tools, required=required, formed=formed)}"]
        rules += self._call_rules(tools, parallel=parallel) if tools else []
        rules += self._thought_rules() if self.thinking else []
        if not required and not formed:
            rules += self._text_rules()
        return "\n".join(rules) + "\n"

    def _start(self, tools: Sequence[Tool], *, required: bool, formed: bool) -> str:
        thoughts = "thoughts " if self.begun else "thoughts? " if self.thinking else ""
        if formed and not tools:
            return f"{thoughts}@said"
        if required or formed:
            calls = f"{self._literal(self._opening)} calls"
            return thoughts + (calls if required else f"(@said | {calls})")
        opened = "calls" if self.calls.bare else f"before {self._rest()} calls"
        return f"{thoughts}(said | {opened})"

    @property
    def _opening(self) -> str:
        return "" if self.calls.bare else self.calls.openings[0]

    def _rest(self) -> str:
        """Return the part of the opening that `_text_rules` have not put at the end of the text."""
        return self._literal(self._opening) if self._opening in self.special else ""

    def _text_rules(self) -> list[str]:
        """Return the rules of text: `said` is a text without calls, `before` one up to a call."""
        if self.calls.bare:
            return [r"said: SAID?", r"SAID: /[^{ \t\r\n](.|\n)*/"]
        if self._opening in self.special:
            return ["said: TEXT", "before: TEXT", r"TEXT: /(.|\n)*/"]
        opening = _escaped(self._opening)
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

    def _call_rules(self, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        """Return the rules of `calls`, which follow the first opening."""
        form = self.calls
        opening, closing = self._literal(self._opening), self._literal(form.closing)
        separator = self._literal(form.separator)
        if form.named:
            calls, again = "call", f"{opening} call"
        elif form.listed:
            calls, again = "call", '", " call'
        elif form.bare:
            calls, again = "call", f"{separator} call"
        else:
            one = f'"\\n" call "\\n" {closing}'
            calls, again = one, f"{separator} {opening} {one}"
        if parallel:
            calls += f" ({again})*"
        if form.listed:
            calls = f'" "? "[" {calls} "]" {closing}'
        names = " | ".join(f"call_{place}" for place in range(len(tools)))
        rules = [f"calls: {calls}", f"call: {names}"]
        for place, tool in enumerate(tools):
            if form.named:
                call = f"{json.dumps(tool.name)} {self._literal(ARGS)} args_{place}"
            else:
                # Cut at the tokens of JSON, because another JSON value may begin alike.
                name, key = json.dumps(tool.name), json.dumps(form.arguments)
                head = map(json.dumps, ("{", '"name"', ": ", name, ", ", key, ": "))
                call = f'{" ".join(head)} args_{place} "}}"'
            rules += [f"call_{place}: {call}", f"args_{place}: %json {_schema(tool)}"]
        return rules

    def _literal(self, text: str) -> str:
        if not text:
            return ""
        token = self.special.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


def _schema(tool: Tool) -> str:
    """Return the schema of a tool's arguments; a tool without a schema takes no arguments.

    A schema that lists arguments allows no others by default: a small model would invent some.
    """
    schema: dict[str, object] = {"properties": {}} if tool.parameters is None else tool.parameters
    if "properties" in schema and not schema.keys() & _OPEN:
        schema = {"additionalProperties": False, **schema}
    return json.dumps({"type": "object", **schema, "x-guidance": LAYOUT})


def _escaped(text: str) -> str:
    """Escape a text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")
