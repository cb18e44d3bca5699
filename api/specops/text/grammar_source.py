"""Translates grammars for the library llguidance, and tests them.

JSON schemas are rewritten first (`specops.text.schemas`). If the result is too much for the
library, or contradicts itself, a simpler one is tried.

Grammars are strangers' programs, so `grammar_worker` runs this in a process with limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from specops.request import Grammar, GrammarKind, ToolArguments
from specops.text.gbnf import is_gbnf, to_lark
from specops.text.json_values import loads
from specops.text.schemas import patterns
from specops.text.schemas.references import SchemaError
from specops.text.schemas.shapes import TYPES
from specops.text.schemas.writer import Rewritten, rewrite

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHARACTERS = 3 << 16
"""Maximum length of a grammar's text."""
MEMORY_BYTES = 128 << 20
"""Maximum address space of a compilation."""
STACK_BYTES = 4 << 20
"""Maximum stack for testing a grammar; it is then compiled on four times as much."""
_MAX_WRITTEN = 1 << 19  # characters of a grammar in the library's form
# Models write JSON with these separators. With free white space a small model could write spaces
# forever, and no token of the layout would be forced.
LAYOUT: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# All requests wait for a mask. With twice this fuel, the slowest known mask takes 0.27 s, and no
# more of 2,519 published schemas compile.
LIMITS = LLParserLimits(
    step_max_items=5_000, step_lexer_fuel=25_000, max_lexer_states=20_000, verbose_errors=False
)


SPECIAL = b"\xff"
"""Precedes a special token's name: no text has this byte."""


class _Source(TokenizerWrapper):
    """The tokenizer interface that the library expects."""

    is_tokenizer_wrapper, bos_token_id = True, None
    special_token_ids: Sequence[int] = ()  # `SPECIAL` marks them already

    def __init__(
        self, tokens: Sequence[bytes], end: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.tokens, self.eos_token_id, self._encode = tokens, end, encode

    def __call__(self, text: str) -> list[int]:
        return [*self._encode(text)]


def vocabulary_of(
    tokens: Sequence[bytes],
    ends: Sequence[int],
    encode: Callable[[str], Sequence[int]],
    slices: list[str],
) -> LLTokenizer:
    """Return a vocabulary in the library's form.

    Args:
        tokens: the bytes of each token.
        ends: the tokens that end a text, in order.
        encode: returns the tokens of a text that continues another.
        slices: regular expressions of sets of tokens whose masks are cached.
    """
    source = _Source(tokens, ends[0], encode)
    made = LLTokenizer(source, eos_token=[*ends], slices=slices)
    source.tokens = []  # the library has read them
    return made


class GrammarError(ValueError):
    """A grammar cannot be compiled or followed; the message says why.

    Attributes:
        in_tools: a tool's schema is the reason.
    """

    def __init__(self, message: str, *, in_tools: bool = False) -> None:
        self.in_tools = in_tools
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class IgnoredKeyword:
    """A keyword of a JSON schema that the answer need not follow.

    Attributes:
        path: its JSON pointer; empty for a tool's whole schema.
        tool: name of the tool with the schema; None: it is the schema of the answer's text.
    """

    path: str
    tool: str | None = None


class Effort(IntEnum):
    """How much of the schemas goes into a grammar: less if more cannot be compiled."""

    WHOLE = 0
    PLAIN = 1  # nothing that requires combinations of schemas
    FREE = 2  # nothing from tools that are not strict


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar in the library's form."""

    text: str
    ignored: tuple[IgnoredKeyword, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)  # JSON pointers of definitions
    arguments: tuple[str, ...] = ()  # of the tools, in Lark


def _characters(grammar: Grammar, effort: Effort) -> int:
    schemas = (tool.schema for tool in grammar.arguments if effort < Effort.FREE or tool.strict)
    said = len(grammar.said.text) if grammar.said else 0
    return len(grammar.text) + said + sum(map(len, schemas))


def efforts(grammar: Grammar) -> Iterator[Effort]:
    """Yield the ways to write a grammar, the best one first."""
    yield Effort.WHOLE
    kinds = {grammar.kind, grammar.said.kind if grammar.said else None}
    if GrammarKind.JSON_SCHEMA in kinds or grammar.arguments:
        yield Effort.PLAIN
    if any(not tool.strict for tool in grammar.arguments):
        yield Effort.FREE


def check(matcher: LLMatcher) -> None:
    """Raise the error that a matcher has met, if any.

    Raises:
        GrammarError: the matcher's.
    """
    if matcher.is_error():
        reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise GrammarError("it allows no text" if reason == "NoExtensionBias" else reason)


def explained(reason: str, grammar: Grammar, source: Source) -> GrammarError:
    """Return the library's reason in terms of the client's grammar, without generated rules.

    Args:
        reason: the library's error message.
        grammar: the client's.
        source: its translation.
    """
    for tool, written in zip(grammar.arguments, source.arguments, strict=True):
        rule = f"start: TEXT\nTEXT: {written}" if tool.form else f"start: {written}"
        if own := LLMatcher.validate_grammar(rule, limits=LIMITS):
            own = _DEFINITION.sub("a definition", _first(own))
            return GrammarError(f"tool {tool.tool!r}: {own}", in_tools=True)
    generated = grammar.arguments or grammar.said is not None
    if not generated and grammar.kind is not GrammarKind.JSON_SCHEMA:
        return GrammarError(reason)  # with the client's own lines
    said = _DEFINITION.sub(lambda match: _origin(match, source), _first(reason))
    return GrammarError(said, in_tools=bool(generated) and grammar.said is None)


# How the library names a schema's definitions, and the place of an error in a text.
_DEFINITION = re.compile(r"json-schema:///#/\$defs/(\w+)")
_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")


def _first(reason: str) -> str:
    """Return the library's reason without the lines that it quotes from the grammar."""
    return _PLACE.sub("", reason.partition("\n   1 | ")[0]).replace("\n ", "").strip()


def _origin(match: re.Match[str], source: Source) -> str:
    return source.origins.get(match[1]) or "the schema"


def write(grammar: Grammar, effort: Effort) -> Source:
    """Return a grammar in the library's form.

    Raises:
        GrammarError: a schema is wrong, or the grammar is too large.
    """
    if _characters(grammar, effort) > MAX_CHARACTERS:
        in_tools = _characters(grammar, Effort.FREE) <= MAX_CHARACTERS
        raise GrammarError(f"it has more than {MAX_CHARACTERS} characters", in_tools=in_tools)
    source = _written(grammar, effort)
    if len(source.text) > _MAX_WRITTEN:
        raise GrammarError("it is too large once it is expanded")
    return source


def _written(grammar: Grammar, effort: Effort) -> Source:
    text: str
    ignored: list[IgnoredKeyword] = []
    origins: Mapping[str, str] = {}
    match grammar.kind:
        case GrammarKind.JSON_OBJECT | GrammarKind.JSON_SCHEMA:
            try:
                rewritten = _rewritten(grammar.text, effort, strict=grammar.strict)
            except ValueError as error:
                raise GrammarError(str(error)) from None
            try:
                text = LLMatcher.grammar_from_json_schema(
                    json.dumps(rewritten.schema), defaults=LAYOUT
                )
            except ValueError as error:  # the library has a limit of depth
                raise GrammarError(f"the schema, its references followed: {error}") from None
            ignored += (IgnoredKeyword(path) for path in rewritten.ignored)
            origins = rewritten.origins
        case GrammarKind.REGEX:
            text = LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            options = map(json.dumps, json.loads(grammar.text))
            # One lexeme: as alternatives of a rule, more than 2,000 could not be followed.
            text = LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(options)}")
        case GrammarKind.LARK:
            try:
                lark = to_lark(grammar.text) if is_gbnf(grammar.text) else grammar.text
            except ValueError as error:
                raise GrammarError(str(error)) from None
            text = LLMatcher.grammar_from_lark(lark)
    arguments = []
    for tool in grammar.arguments:
        described, paths = _described_arguments(tool, effort)
        arguments.append(described)
        text += f"{tool.rule}: {described}\n"
        ignored += (IgnoredKeyword(tool.path + path, tool.tool) for path in paths)
    if grammar.said is not None:
        said = _written(grammar.said, effort)
        ignored += said.ignored
        parts = [{"lark_grammar": text}, {"name": "said", **_part(said.text)}]
        text, origins = json.dumps({"grammars": parts}), said.origins
    return Source(text, tuple(ignored), origins, tuple(arguments))


def _rewritten(text: str, effort: Effort, *, strict: bool) -> Rewritten:
    return rewrite(loads(text), strict=strict, plain=effort > Effort.WHOLE)


def _described_arguments(tool: ToolArguments, effort: Effort) -> tuple[str, tuple[str, ...]]:
    """Return a tool's arguments in Lark, and the paths of their schema's parts that are ignored.

    If the tool is not strict, any schema is accepted.

    Raises:
        GrammarError: the schema is wrong.
    """
    path = ""
    if tool.strict or effort < Effort.FREE:
        try:
            rewritten = _rewritten(tool.schema, effort, strict=tool.strict)
            return _described(tool, rewritten.schema), rewritten.ignored
        except ValueError as error:
            if tool.strict:
                at = tool.path if isinstance(error, SchemaError) and error.path else ""
                raise GrammarError(f"tool {tool.tool!r}: {at}{error}", in_tools=True) from None
            path = error.path if isinstance(error, SchemaError) else ""
    return _described(tool, _of_same_type(tool.schema)), (path,)


def _described(tool: ToolArguments, schema: Mapping[str, Any]) -> str:
    """Return a rewritten schema's values in Lark.

    Raises:
        SchemaError: the value is no JSON, and the schema cannot be enforced for it.
    """
    if not tool.form:
        return "%json " + json.dumps({**schema, "x-guidance": LAYOUT})
    expressions = [rf"(.|\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"]
    for part in (schema, *schema.get("allOf", ())):
        if "pattern" in part:
            if (pattern := patterns.whole(part["pattern"])) is None:
                raise SchemaError("/pattern", "`pattern` with `strict`: it cannot be enforced here")
            expressions.append(pattern)
    return tool.form.replace("@text", f"({' & '.join(map(_between_slashes, expressions))})")


def _between_slashes(expression: str) -> str:
    """Return a regular expression in Lark's notation."""
    escaped = re.sub(r"\\?(\n)|(\\.)|/", lambda it: r"\n" if it[1] else it[2] or r"\/", expression)
    return f"/{escaped}/"


def _of_same_type(text: str) -> dict[str, object]:
    """Return a schema that only has another schema's type."""
    try:
        kind = loads(text).get("type")
    except ValueError:
        return {"type": "object"}
    return {"type": kind} if isinstance(kind, str) and kind in (*TYPES, "integer") else {}


def _part(source: str) -> dict[str, object]:
    """Return a grammar in the library's form as a part of a combined one."""
    if not source.startswith("{"):
        return {"lark_grammar": source}
    (part,) = json.loads(source)["grammars"]
    return {key: value for key, value in part.items() if key != "name"}


def grammar_of(fields: Mapping[str, Any]) -> Grammar:
    """Return the grammar with these fields, which `dataclasses.asdict` returned."""
    said = fields["said"]
    return Grammar(
        GrammarKind(fields["kind"]),
        fields["text"],
        None if said is None else grammar_of(said),
        tuple(ToolArguments(**tool) for tool in fields["arguments"]),
        fields["strict"],
    )
