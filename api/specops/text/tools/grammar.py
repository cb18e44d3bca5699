"""What an answer may consist of where it must call tools, or call them by their schema.

The grammar, in llguidance's dialect of Lark, writes calls as the family does. Everything but the
arguments' values is certain, so that it costs next to nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specops.text.grammar import LAYOUT
from specops.text.tools.formats import ARGS, Tool, ToolFormat

# Where a schema of arguments may list some: those of its own `properties` are not all.
_OPEN = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Writes the grammar of a model's answers.

    Args:
        special: the tags among its special tokens, which are no text, with their tokens.
        thinking: the tags between which it thinks; None where it does not.
        begun: its prompts end with the first of these tags.
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
            tools: that may be called; without any there are none.
            required: the answer consists of calls, and of thoughts before them; else it may be
                text as well, and what begins like a call is one.
            parallel: it may have several calls.
            formed: text follows a grammar of its own, `@said`, and none stands before calls.
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
        """Of the first call's opening: what the text before it does not end with."""
        return self._literal(self._opening) if self._opening in self.special else ""

    def _text_rules(self) -> list[str]:
        """Text that is no call; `before` is text up to a call."""
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
                r"SPACE: /\s*/",
            ]
        return [
            f"thoughts: {first} thought SPACE",
            rf"thought[lazy]: /(.|\n)*?{_escaped(closing)}/",
            r"SPACE: /\s*/",
        ]

    def _call_rules(self, tools: Sequence[Tool], *, parallel: bool) -> list[str]:
        """`calls`, behind the first one's opening."""
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
                # In pieces where JSON has them: another JSON may begin alike.
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
    """The schema of a tool's arguments, which are an object; without one there are none.

    Where it lists them and says no more, there are no others: a small model would invent some.
    """
    schema: dict[str, object] = {"properties": {}} if tool.parameters is None else tool.parameters
    if "properties" in schema and not schema.keys() & _OPEN:
        schema = {"additionalProperties": False, **schema}
    return json.dumps({"type": "object", **schema, "x-guidance": LAYOUT})


def _escaped(text: str) -> str:
    """Text in a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")
