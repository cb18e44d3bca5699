"""Writes the grammar of answers that must call tools, or whose calls must follow a schema.

The grammar, in llguidance's dialect of Lark, describes calls in the format of the model's family.
All tokens except arguments' values are forced, so they cost next to nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specops.request import Grammar, GrammarKind, ToolArguments
from specops.text.grammar_source import MAX_CHARACTERS
from specops.text.schemas.references import Document, escaped
from specops.text.tools.arguments import listed_properties, resolved, types_of
from specops.text.tools.formats import WILDCARD, Tool, ToolFormat, parts

# Between reasoning and answer; without a bound, a weak model would write spaces forever.
_SPACE = r"SPACE: /\s{0,4}/"
# Keywords that are enforced for a text without quotes.
_OF_TEXTS = ("pattern", "minLength", "maxLength")
Rule = str | ToolArguments  # in Lark, or from a schema


@dataclass(slots=True)
class _Schemas:
    """The schemas of a tool's arguments.

    Attributes:
        tool: the tool.
        document: resolves their references.
        ruled: names of the schemas' rules so far, by identity: a schema may contain itself.
        pending: referenced schemas that have no rules yet, as arguments of `_marked_rules`.
        characters: length of the schemas with rules so far.
    """

    tool: Tool
    document: Document
    ruled: dict[int, str] = field(default_factory=dict)
    pending: list[tuple[str, _Schemas, str, dict[str, Any]]] = field(default_factory=list)
    characters: int = 0


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Writes the grammar of a model's answers.

    Args:
        calls: the model's format of calls.
        special: the tags that are single tokens, with their ids; see `Tokenizer.mark`.
        reasoning_tags: the tags around the model's reasoning; None if it does not reason.
        starts_in_reasoning: whether the prompt ends with the first of these tags.
    """

    calls: ToolFormat
    special: Mapping[str, int]
    reasoning_tags: tuple[str, str] | None
    starts_in_reasoning: bool

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
            required: the answer must be calls, perhaps after reasoning. Otherwise it may also be
                text, but text that begins like a call must be one.
            parallel: whether the answer may have several calls.
            text_grammar: constrains the answer's text; then no text may precede calls.
        """
        formed = text_grammar is not None
        rules: list[Rule] = [f"start: {self._start(tools, required=required, formed=formed)}"]
        rules += self._call_rules(tools, parallel=parallel) if tools else []
        rules += self._reasoning_rules() if self.reasoning_tags else []
        if not required and not formed:
            rules += self._text_rules()
        text = "".join(f"{rule}\n" for rule in rules if isinstance(rule, str))
        arguments = tuple(rule for rule in rules if not isinstance(rule, str))
        said = None if required else text_grammar
        return Grammar(GrammarKind.LARK, text, said, arguments)

    def _start(self, tools: Sequence[Tool], *, required: bool, formed: bool) -> str:
        reasoning = (
            "reasoning "
            if self.starts_in_reasoning
            else "reasoning? "
            if self.reasoning_tags
            else ""
        )
        if formed and not tools:
            return f"{reasoning}@said"
        if required or formed:
            calls = f"{self._literal(self.calls.mark)} calls"
            return reasoning + (calls if required else f"(@said | {calls})")
        opened = "calls" if self.calls.bare else f"before {self._rest()} calls"
        return f"{reasoning}(said | {opened})"

    def _rest(self) -> str:
        """Return the part of the opening that `_text_rules` do not put at the end of the text."""
        return self._literal(self.calls.mark) if self.calls.mark in self.special else ""

    def _text_rules(self) -> list[str]:
        """Return the rules of text: `said` has no calls, `before` precedes a call."""
        if self.calls.bare:
            return [r"said: SAID?", r"SAID: /[^{ \t\r\n](.|\n)*/"]
        opening = self.calls.mark
        said = f"SAID: {_text_without(opening)}"
        if opening in self.special:
            return ["said: SAID", "before: SAID", said]
        return ["said: SAID", said, rf"before[lazy]: /(.|\n)*?{_escaped(opening)}/"]

    def _reasoning_rules(self) -> list[str]:
        opening, closing = self.reasoning_tags or ("", "")
        first = "" if self.starts_in_reasoning else self._literal(opening)
        if closing in self.special:
            return [
                f"reasoning: {first} REASONING_TEXT {self._literal(closing)} SPACE",
                f"REASONING_TEXT: {_text_without(closing)}",
                _SPACE,
            ]
        return [
            f"reasoning: {first} reasoning_text SPACE",
            rf"reasoning_text[lazy]: /(.|\n)*?{_escaped(closing)}/",
            _SPACE,
        ]

    def _call_rules(self, tools: Sequence[Tool], *, parallel: bool) -> list[Rule]:
        """Return the rules of `calls`, which follow the opening's mark."""
        form = self.calls
        opening = form.opening.removeprefix(form.mark)
        mistral = form.style == "json" and opening.startswith("[")
        space = '" "? ' if mistral else ""  # its models write one
        calls = f"{space}{self._literal(opening)} call"
        if parallel:
            calls += f" ({self._literal(form.between)} call)*"
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        rules: list[Rule] = [f"calls: {calls} {self._literal(form.closing)}", f"call: {names}"]
        varies = any(
            WILDCARD in text for text in (form.opening, form.between, form.middle, form.lead)
        )
        rules += [r"varies: /[\w-]{1,40}/"] if varies else []
        for index, tool in enumerate(tools):
            rules += self._call_rule(f"_{index}", tool)
        return list(dict.fromkeys(rules))  # several values may need the rules for any value

    def _call_rule(self, suffix: str, tool: Tool) -> list[Rule]:
        form = self.calls
        if form.style in ("tagged", "literal"):
            schemas = _Schemas(tool, Document(tool.parameters))
            members, rules = self._members(f"arg{suffix}", schemas, _parameters(tool), "")
            while schemas.pending:
                rules += self._marked_rules(*schemas.pending.pop())
            name = f"{json.dumps(tool.name)} {self._literal(form.middle)}"
            return [f"call{suffix}: {name} {members}", *rules]
        rules = [_arguments(f"args{suffix}", tool, _parameters(tool))]
        if form.style == "named":
            name = f"{json.dumps(tool.name)} {self._literal(form.middle)}"
            return [f"call{suffix}: {name} args{suffix}", *rules]
        # Split at JSON's tokens, because another JSON value may begin the same way.
        name_key, name, key = map(json.dumps, (form.name_key, tool.name, form.arguments_key))
        head = [f"{json.dumps('{')} {self._literal(form.lead)}"]
        head += map(json.dumps, (name_key, ": ", name, ", ", key, ": "))
        return [f'call{suffix}: {" ".join(head)} args{suffix} "}}"', *rules]

    def _members(
        self, name: str, schemas: _Schemas, schema: Mapping[str, Any], path: str
    ) -> tuple[str, list[Rule]]:
        """Return an object's members in its schema's order, as a rule's body, and their rules.

        Texts follow their schema's length and pattern, but not its other keywords.

        Args:
            name: prefix of the rules' names.
            schemas: the tool's schemas.
            schema: the object's schema.
            path: JSON pointer of this schema within the tool's.
        """
        form = self.calls
        properties = listed_properties(schema)
        listed = schema["required"] if isinstance(schema.get("required"), list) else []
        shut = schema.get("additionalProperties") is False and "patternProperties" not in schema
        required = [
            key for key in listed if isinstance(key, str) and (key in properties or not shut)
        ]
        keys = dict.fromkeys((*properties, *required))
        order = sorted(keys, key=lambda key: key not in required)
        rules: list[Rule] = []
        for index, key in enumerate(order):
            own, place = f"{name}_{index}", f"{path}/properties/{escaped(key)}"
            written = form.inner_key(key) if path else key
            opened = self._literal(f"{form.key_open}{written}{form.key_close}")
            value = self._value_rule(own, schemas, place, properties.get(key, {}))
            rules += [f"{own}: {opened} {own}_value", *value]
        comma = self._literal(form.value_close) if form.style == "literal" else ""
        rest = ""  # the members from a given one on
        if _is_open(schema):
            more = f"{name}_more"
            opened = f"{self._literal(form.key_open)} KEY_{name.upper()}"
            rules += [f"{more}: {opened} {self._literal(form.key_close)} {more}_value"]
            rules += self._value_rule(more, schemas, path, {})
            rules.append(rf"KEY_{name.upper()}: /[\w.-]{{1,64}}/")
            rest = f"{more} ({comma} {more})*"
        must = False
        for index in reversed(range(len(order))):
            follows = f"({comma} {rest}){'' if must else '?'}" if rest else ""
            must = order[index] in required
            without = f" | {rest}" if rest and not must else ""
            rules.append(f"{name}_from_{index}: {name}_{index} {follows}{without}")
            rest = f"{name}_from_{index}"
        return rest if must or not rest else f"({rest})?", rules

    def _value_rule(self, name: str, schemas: _Schemas, path: str, schema: Any) -> list[Rule]:
        """Return the rules of a member's value, including the closing tag, if any."""
        form = self.calls
        if form.marked:
            return self._marked_rules(name, schemas, path, schema)
        schema = resolved(schema, schemas.document)
        choices, types = _choices(schema), types_of(schema)
        if form.style == "literal":  # JSON, perhaps with Python's constants
            words = (("boolean", '"True" | "False"'), ("null", '"None"'))
            own = [word for kind, word in words if kind in types and not choices]
            return self._json_rules(name, schemas, path, schema, *own)
        close = self._literal(form.value_close)
        if choices and types == {"string"}:
            written = " | ".join(json.dumps(str(choice)) for choice in choices)
            return [f"{name}_value: ({written}) {close}"]
        if types and "string" not in types:
            first, *rules = self._json_rules(name, schemas, path, schema)
            return [f"{first} {close}", *rules]
        return self._raw_text_rules(name, schemas, path, schema if types == {"string"} else {})

    def _json_rules(
        self, name: str, schemas: _Schemas, path: str, schema: Mapping[str, Any], *others: str
    ) -> list[Rule]:
        """Return the rules of a value that is JSON by its schema, or one of `others`."""
        whole: dict[str, Any] = schemas.tool.parameters or {}
        words = {"$defs", "definitions"}
        if schemas.characters > MAX_CHARACTERS:  # the grammar is already too large: add no more
            whole, schema = {}, {"type": schema["type"]} if "type" in schema else {}
        shared = {word: whole[word] for word in whole.keys() & words}
        value = _arguments(f"{name}_json", schemas.tool, {**shared, **schema}, path)
        schemas.characters += len(value.schema)
        return [f"{name}_value: ({' | '.join((f'{name}_json', *others))})", value]

    def _marked_rules(self, name: str, schemas: _Schemas, path: str, schema: Any) -> list[Rule]:
        """Return the rules of a value in a format with special marks around texts.

        For lists and objects, only the schemas of items and members are enforced.
        """
        if isinstance(schema, dict) and "$ref" in schema:
            schema = resolved(schema, schemas.document)
            if schema and id(schema) not in schemas.ruled:
                shared = f"{name.partition('_ref_')[0]}_ref_{len(schemas.ruled)}"
                schemas.ruled[id(schema)] = shared
                schemas.pending.append((shared, schemas, path, schema))
        if not isinstance(schema, dict) or not schema:
            return [f"{name}_value: any_value", *self._any_rules(schemas)]
        if (known := schemas.ruled.setdefault(id(schema), name)) != name:
            return [f"{name}_value: {known}_value"]
        if choices := _choices(schema):
            written = (self._literal(self.calls.literal(choice)) for choice in choices)
            return [f"{name}_value: {' | '.join(written)}"]
        options: list[str] = []
        rules: list[Rule] = []
        for key in ("anyOf", "oneOf") if "type" not in schema else ():
            branches = schema[key] if isinstance(schema.get(key), list) else []
            for index, branch in enumerate(branches):
                own, place = f"{name}_{key.lower()}_{index}", f"{path}/{key}/{index}"
                options.append(f"{own}_value")
                rules += self._marked_rules(own, schemas, place, branch)
        if not options:
            options, rules = self._by_type(name, schemas, path, schema)
        return [f"{name}_value: {' | '.join(options)}", *rules]

    def _by_type(
        self, name: str, schemas: _Schemas, path: str, schema: dict[str, Any]
    ) -> tuple[list[str], list[Rule]]:
        """Return a value's alternatives, one for each of its types, and their rules."""
        types = types_of(schema)
        options: list[str] = []
        rules: list[Rule] = []
        if "string" in types:
            options.append(f"{name}_string_value")
            rules += self._raw_text_rules(f"{name}_string", schemas, path, schema)
        if "array" in types and isinstance(schema.get("items"), dict):
            item = f"{name}_item"
            options.append(self._series("[", f"{item}_value", "]"))
            rules += self._marked_rules(item, schemas, f"{path}/items", schema["items"])
        elif "array" in types:
            options.append("any_list")
            rules += self._any_rules(schemas)
        if "object" in types and isinstance(schema.get("properties"), dict):
            members, of_members = self._members(name, schemas, schema, path)
            options.append(f'"{{" {members} "}}"')
            rules += of_members
        elif "object" in types:
            options.append("any_object")
            rules += self._any_rules(schemas)
        if others := sorted(types - {"string", "array", "object"}):
            options.append(f"{name}_other_value")
            rules += self._json_rules(f"{name}_other", schemas, path, {**schema, "type": others})
        return (options, rules) if options else (["any_value"], [*self._any_rules(schemas)])

    def _any_rules(self, schemas: _Schemas) -> list[Rule]:
        """Return the rules of any value, in a format with special marks around texts."""
        words = 'ANY_NUMBER | "true" | "false" | "null"'
        return [
            f"any_value: any_text_value | {words} | any_list | any_object",
            f"any_list: {self._series('[', 'any_value', ']')}",
            f"any_object: {self._series('{', 'any_member', '}')}",
            rf"any_member: ANY_KEY {self._literal(self.calls.key_close)} any_value",
            r"ANY_KEY: /[\w.$\/-]([\w.$\/ -]{0,62}[\w.$\/-])?/",
            r"ANY_NUMBER: /-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?/",
            *self._raw_text_rules("any_text", schemas, "", {}),
        ]

    def _series(self, opening: str, item: str, closing: str) -> str:
        comma = self._literal(self.calls.value_close)
        return f'"{opening}" ({item} ({comma} {item})*)? "{closing}"'

    def _raw_text_rules(
        self, name: str, schemas: _Schemas, path: str, schema: Mapping[str, Any]
    ) -> list[Rule]:
        """Return the rules of a text without escapes, and of its closing mark."""
        said = {keyword: schema[keyword] for keyword in _OF_TEXTS if keyword in schema}
        text = "@text" if said else r"/(.|\n)*/"
        opened = self._literal(self.calls.quote) if self.calls.marked else ""
        close = self.calls.quote if self.calls.marked else self.calls.value_close
        mark = next(iter(parts(close)))
        before, after = close.split(mark, 1)
        before = before and f"(/{_escaped(before)}/)"
        unmarked = rf"~/(.|\n)*{_escaped(mark)}(.|\n)*/"
        if mark in self.special:
            rule, after = name.upper(), mark + after
            form = f"{text} {before} & {unmarked}"
            value = f"{name}_value: {opened} {rule} {self._literal(after)}"
        else:
            # The mark ends the text even if the model omits what should precede it. Otherwise the
            # text would continue, although the reader has ended the call.
            rule, before = f"{name}_text[lazy]", before and f"{before}?"
            form = f"{f'({text} & {unmarked})' if said else text} {before} /{_escaped(mark)}/"
            value = f"{name}_value: {opened} {name}_text {self._literal(after)}"
        if not said:
            return [value, f"{rule}: {form}"]
        return [value, _arguments(rule, schemas.tool, {"type": "string", **said}, path, form)]

    def _literal(self, text: str) -> str:
        """Return a format's text for a rule, with its special tokens."""
        known = [WILDCARD, *self.special]
        pieces = re.split("(" + "|".join(map(re.escape, known)) + ")", text)
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def _piece(self, text: str) -> str:
        if text == WILDCARD:
            return "varies"
        token = self.special.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


def _text_without(mark: str) -> str:
    """Return a terminal for text that does not contain a mark."""
    return rf"/(.|\n)*/ & ~/(.|\n)*{_escaped(mark)}(.|\n)*/"


def _choices(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return the values that a schema lists; none if it allows others."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else ()


def _arguments(
    rule: str, tool: Tool, schema: Mapping[str, Any], path: str = "", form: str = ""
) -> ToolArguments:
    return ToolArguments(rule, tool.name, json.dumps(schema), tool.strict, path, form)


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Whether an object may have properties that its schema does not list."""
    joins = schema.keys() & {"allOf", "anyOf", "oneOf", "$ref"}
    free = "properties" not in schema and "additionalProperties" not in schema
    says = "patternProperties" in schema or schema.get("additionalProperties", False) is not False
    return bool(joins) or free or says


def _parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments; a missing or empty schema means no arguments.

    The prompt says the same (`Tool.for_template`).
    """
    return {"type": "object", **(tool.parameters or {"properties": {}})}


def _escaped(text: str) -> str:
    """Escape a text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
