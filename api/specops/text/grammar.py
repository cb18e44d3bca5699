"""Grammars of answers: which tokens may come next, as masks over the vocabulary.

The library llguidance follows a grammar byte by byte. Compiled grammars are cached; every request
gets a matcher of its own, a copy that takes microseconds. JSON schemas are rewritten before
(`specops.text.schemas`); if the result is too much for the library, or contradicts itself, a
plainer one is tried.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits

from specops.request import Grammar, GrammarKind, ToolArguments
from specops.text.grammar_vocabulary import GrammarVocabulary, UnsupportedTokenizer
from specops.text.json_values import loads
from specops.text.schemas.complement import TYPES
from specops.text.schemas.errors import SchemaError
from specops.text.schemas.writer import Rewritten, rewrite
from specops.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MOST_CHARACTERS = 1 << 17
"""Longest text of a grammar: the worst known one of this length compiles in a second."""
Masks = npt.NDArray[np.uint32]
_KEPT = 64  # number of cached grammars
# Sum of their texts: a character takes up to 130 bytes of the compiled grammar.
_KEPT_CHARACTERS = 4 * MOST_CHARACTERS
_MOST_WRITTEN = 4 * MOST_CHARACTERS  # characters of a grammar in the library's form
# Models write JSON with these separators. With free white space a small model could write spaces
# without end, and no token of the layout would be certain.
LAYOUT: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# With the library's own limits, a mask of the worst known grammar takes 26 ms, while all requests
# wait.
_LIMITS = LLParserLimits(
    step_max_items=5_000, step_lexer_fuel=50_000, max_lexer_states=20_000, verbose_errors=False
)
_WORD = 32  # tokens in a word of a mask


class GrammarError(ValueError):
    """A grammar cannot be compiled or followed; the message says why.

    Attributes:
        in_tools: a tool's schema is the reason.
    """

    def __init__(self, message: str, *, in_tools: bool = False) -> None:
        self.in_tools = in_tools
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A keyword of a JSON schema that the answer need not follow.

    Attributes:
        path: its JSON pointer; empty for a tool's whole schema.
        tool: name of the tool with the schema; None: it is the schema of the answer's text.
    """

    path: str
    tool: str | None = None


class _Effort(IntEnum):
    """How much of the schemas goes into a grammar: less where more cannot be compiled."""

    WHOLE = 0
    PLAIN = 1  # nothing that has to be written as combinations of schemas
    FREE = 2  # nothing of tools that are not strict


@dataclass(frozen=True, slots=True)
class _Source:
    """A grammar in the library's form."""

    text: str
    left_out: tuple[LeftOut, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)  # of definitions: JSON pointers
    arguments: tuple[str, ...] = ()  # the tools' schemas


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Compiled:
    """A compiled grammar, which matchers share."""

    matcher: LLMatcher
    characters: int
    left_out: tuple[LeftOut, ...] = ()


class Grammars:
    """Compiles grammars for one model's vocabulary. Thread-safe.

    It keeps the grammars that were used last, and those of all matchers that still live.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of the model's logits.
        end_tokens: tokens that end a text; they are allowed where the grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self._vocabulary = GrammarVocabulary(tokenizer, vocab_size, end_tokens)
        self._end_tokens = end_tokens
        self._kept: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._living: weakref.WeakValueDictionary[Grammar, _Compiled] = (
            weakref.WeakValueDictionary()
        )
        self._characters = 0  # in their texts
        self._named: set[str] = set()  # keywords that the log has named
        self._lock = threading.Lock()  # for the cache: the engine never waits for a compilation
        self._compiling = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of a grammar; its compilation takes up to half a second.

        Raises:
            GrammarError: the grammar is wrong or too large, or allows no text, or the library does
                not support the model's tokenizer.
        """
        if (matcher := self.compiled(grammar)) is not None:
            return matcher
        with self._compiling:
            if (matcher := self.compiled(grammar)) is not None:
                return matcher
            compiled = self._compile(grammar)
        with self._lock:
            self._keep(grammar, compiled)
            return self._matcher(compiled)

    def compiled(self, grammar: Grammar) -> Matcher | None:
        """Return a matcher at the start of a grammar; None if it has to be compiled first."""
        with self._lock:
            compiled = self._living.get(grammar)
            if compiled is None:
                return None
            self._keep(grammar, compiled)
            return self._matcher(compiled)

    def _matcher(self, compiled: _Compiled) -> Matcher:
        copy = compiled.matcher.deep_copy()
        return Matcher(copy, self._words, self._end_tokens, compiled)

    def _keep(self, grammar: Grammar, compiled: _Compiled) -> None:
        self._living[grammar] = compiled
        if grammar not in self._kept:
            self._kept[grammar] = compiled
            self._characters += compiled.characters
        self._kept.move_to_end(grammar)
        while len(self._kept) > _KEPT or self._characters > _KEPT_CHARACTERS:
            _, oldest = self._kept.popitem(last=False)
            self._characters -= oldest.characters

    @property
    def _words(self) -> int:
        return -(-self._vocabulary.size // _WORD)

    def _compile(self, grammar: Grammar) -> _Compiled:
        reason: GrammarError | None = None
        for effort in _efforts(grammar):
            try:
                compiled = self._compile_source(grammar, effort)
            except GrammarError as error:
                reason = reason or error
                continue
            self._log_once(compiled.left_out)
            return compiled
        raise reason or GrammarError("it allows no text")

    def _compile_source(self, grammar: Grammar, effort: _Effort) -> _Compiled:
        try:
            vocabulary = self._vocabulary.get()
        except UnsupportedTokenizer as error:
            raise GrammarError(str(error)) from error
        size = _characters(grammar, effort)
        if size > MOST_CHARACTERS:
            in_tools = _characters(grammar, _Effort.FREE) <= MOST_CHARACTERS
            raise GrammarError(f"it has more than {MOST_CHARACTERS} characters", in_tools=in_tools)
        source = _source(grammar, effort)
        if len(source.text) > _MOST_WRITTEN:
            raise GrammarError("it is too large once its parts are written out")
        matcher = LLMatcher(vocabulary, source.text, log_level=0, limits=_LIMITS)
        try:
            _check(matcher)
            # The first mask shows whether no token is allowed, or the grammar is too complex.
            Matcher(matcher.deep_copy(), self._words, self._end_tokens).masks(())
        except GrammarError as error:
            raise _explained(str(error), grammar, source) from None
        return _Compiled(matcher, max(size, len(source.text) // 4), source.left_out)

    def _log_once(self, left_out: Sequence[LeftOut]) -> None:
        """Have each kind of keyword that is not enforced in the log once."""
        for item in left_out:
            keyword = item.path.rpartition("/")[2] or "schema"
            if keyword not in self._named:
                self._named.add(keyword)
                log.warning(
                    "a JSON schema's `%s` is not enforced everywhere; answers say where in "
                    "X-Ignored-Fields",
                    keyword,
                )


class Matcher:
    """Position of one answer in its grammar. Used by one thread.

    Args:
        matcher: the library's, at the start of the grammar.
        words: number of words in a mask.
        end_tokens: tokens that end a text.
        compiled: what the matcher was copied from; it stays compiled as long as the matcher lives.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        words: int,
        end_tokens: frozenset[int],
        compiled: _Compiled | None = None,
    ) -> None:
        self._matcher = matcher
        self._compiled = compiled
        self._words = words
        self._end_tokens = end_tokens
        self._now: Masks | None = None  # the mask of the next token, once computed

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The keywords of JSON schemas that the answer need not follow."""
        return () if self._compiled is None else self._compiled.left_out

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow."""
        return self._matcher.is_stopped()

    def allows(self, tokens: Sequence[int]) -> int:
        """Return how many tokens the grammar allows, counted from the first."""
        allowed: int = self._matcher.validate_tokens(list(tokens))
        return allowed

    def advance(self, token: int) -> None:
        """Add a token of the answer.

        Raises:
            GrammarError: the grammar does not allow it, or is too complex to be followed.
        """
        if not self._matcher.consume_token(token):
            _check(self._matcher)
            raise GrammarError(f"token {token} is not allowed here")
        self._now = None

    def forced(self, most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that must follow: each is the only one allowed there.

        End tokens are not returned; the target chooses them.

        Raises:
            GrammarError: the grammar is too complex to be followed.
        """
        certain: list[int] = []
        mask = self._mask()
        while len(certain) < most:
            token = _only(mask)
            if token is None or token in self._end_tokens:
                break
            self._matcher.consume_token(token)
            certain.append(token)
            if self.complete:
                break
            mask = self._fill(mask.copy())
        self._matcher.rollback(len(certain))
        return tuple(certain)

    def masks(self, tokens: Sequence[int], forced: Sequence[int] = ()) -> Masks:
        """Return masks of the allowed tokens after `forced`, and after each of `tokens`.

        Args:
            tokens: [k]; after the first one that ends the text or is not allowed, the masks allow
                all tokens.
            forced: allowed tokens that come before.

        Returns:
            [k + 1, words]; token i is bit i % 32 of word i // 32.

        Raises:
            GrammarError: the grammar is too complex to be followed.
        """
        masks = np.full((len(tokens) + 1, self._words), ~np.uint32(0))
        taken = len(forced)
        self._matcher.consume_tokens(list(forced))
        for row, mask in enumerate(masks):
            if taken:
                self._fill(mask)
            else:
                mask[:] = self._mask()
            if row == len(tokens) or tokens[row] in self._end_tokens:
                break
            if not self._matcher.try_consume_tokens([tokens[row]]):
                break
            taken += 1
        self._matcher.rollback(taken)
        return masks

    def _mask(self) -> Masks:
        """Return the mask of the next token."""
        if self._now is None:
            self._now = self._fill(np.empty(self._words, np.uint32))
        return self._now

    def _fill(self, mask: Masks) -> Masks:
        """Write the mask at the library's current position."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        _check(self._matcher)
        return mask


def _characters(grammar: Grammar, effort: _Effort) -> int:
    schemas = (tool.schema for tool in grammar.arguments if effort < _Effort.FREE or tool.strict)
    said = len(grammar.said.text) if grammar.said else 0
    return len(grammar.text) + said + sum(map(len, schemas))


def _efforts(grammar: Grammar) -> Iterator[_Effort]:
    yield _Effort.WHOLE
    kinds = {grammar.kind, grammar.said.kind if grammar.said else None}
    if GrammarKind.JSON_SCHEMA in kinds or grammar.arguments:
        yield _Effort.PLAIN
    if any(not tool.strict for tool in grammar.arguments):
        yield _Effort.FREE


def _only(mask: Masks) -> int | None:
    """Return the only token of a mask; None if it has none or several."""
    (words,) = mask.nonzero()
    if len(words) != 1:
        return None
    word = int(mask[words[0]])
    return None if word & (word - 1) else int(words[0]) * _WORD + word.bit_length() - 1


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise GrammarError("it allows no text" if reason == "NoExtensionBias" else reason)


def _explained(reason: str, grammar: Grammar, source: _Source) -> GrammarError:
    """Return the library's reason in terms of what the client sent, without generated rules."""
    for tool, schema in zip(grammar.arguments, source.arguments, strict=True):
        if own := LLMatcher.validate_grammar(f"start: %json {schema}", limits=_LIMITS):
            own = _DEFINITION.sub("a definition", _first(own))
            return GrammarError(f"tool {tool.tool!r}: {own}", in_tools=True)
    generated = grammar.arguments or grammar.said is not None
    if not generated and grammar.kind is not GrammarKind.JSON_SCHEMA:
        return GrammarError(reason)  # with the client's own lines
    said = _DEFINITION.sub(lambda match: _origin(match, source), _first(reason))
    return GrammarError(said, in_tools=bool(generated) and grammar.said is None)


# How the library names the definitions of a schema, and where it found a mistake in a text.
_DEFINITION = re.compile(r"json-schema:///#/\$defs/(\w+)")
_PLACE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")


def _first(reason: str) -> str:
    """Return the library's reason without the lines of the grammar that it shows."""
    return _PLACE.sub("", reason.partition("\n   1 | ")[0]).replace("\n ", "").strip()


def _origin(match: re.Match[str], source: _Source) -> str:
    return source.origins.get(match[1]) or "the schema"


def _source(grammar: Grammar, effort: _Effort) -> _Source:
    """Return the grammar in the form that the library takes.

    Raises:
        GrammarError: a schema is wrong.
    """
    text: str
    left_out: list[LeftOut] = []
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
            left_out += (LeftOut(path) for path in rewritten.left_out)
            origins = rewritten.origins
        case GrammarKind.REGEX:
            text = LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            options = map(json.dumps, json.loads(grammar.text))
            text = LLMatcher.grammar_from_lark("start: " + " | ".join(options))
        case GrammarKind.LARK:
            text = LLMatcher.grammar_from_lark(grammar.text)
    arguments = []
    for tool in grammar.arguments:
        rewritten = _rewritten_arguments(tool, effort)
        arguments.append(json.dumps({**rewritten.schema, "x-guidance": LAYOUT}))
        text += f"{tool.rule}: %json {arguments[-1]}\n"
        left_out += (LeftOut(tool.path + path, tool.tool) for path in rewritten.left_out)
    if grammar.said is not None:
        said = _source(grammar.said, effort)
        left_out += said.left_out
        parts = [{"lark_grammar": text}, {"name": "said", **_part(said.text)}]
        text, origins = json.dumps({"grammars": parts}), said.origins
    return _Source(text, tuple(left_out), origins, tuple(arguments))


def _rewritten(text: str, effort: _Effort, *, strict: bool) -> Rewritten:
    return rewrite(loads(text), strict=strict, plain=effort > _Effort.WHOLE)


def _rewritten_arguments(tool: ToolArguments, effort: _Effort) -> Rewritten:
    """Return the schema of a tool's arguments; if it is not strict, any schema will do.

    Raises:
        GrammarError: the schema is wrong.
    """
    path = ""
    if tool.strict or effort < _Effort.FREE:
        try:
            return _rewritten(tool.schema, effort, strict=tool.strict)
        except ValueError as error:
            if tool.strict:
                raise GrammarError(f"tool {tool.tool!r}: {error}", in_tools=True) from None
            path = error.path if isinstance(error, SchemaError) else ""
    return Rewritten(_of_same_type(tool.schema), (path,), {})


def _of_same_type(text: str) -> dict[str, object]:
    """Return a schema that says as little as the type of what another one describes."""
    try:
        kind = loads(text).get("type")
    except ValueError:
        return {"type": "object"}
    return {"type": kind} if isinstance(kind, str) and kind in (*TYPES, "integer") else {}


def _part(source: str) -> dict[str, object]:
    """Return a grammar in the library's form as one of several."""
    if not source.startswith("{"):
        return {"lark_grammar": source}
    (part,) = json.loads(source)["grammars"]
    return {key: value for key, value in part.items() if key != "name"}
