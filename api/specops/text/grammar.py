"""Grammars of answers: which tokens may come next, as masks over the vocabulary.

The library llguidance follows a grammar byte by byte. Compiled grammars are cached; every request
gets a matcher of its own, a copy that takes microseconds.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specops.request import Grammar, GrammarKind
from specops.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MOST_CHARACTERS = 1 << 17
"""Longest text of a grammar: the worst known one of this length compiles in a second."""
Masks = npt.NDArray[np.uint32]
_KEPT = 64  # number of cached grammars
# Sum of their texts: a character takes up to 130 bytes of the compiled grammar.
_KEPT_CHARACTERS = 4 * MOST_CHARACTERS
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
    """A grammar cannot be compiled or followed; the message says why."""


class _Compiled:
    """A compiled grammar, which matchers share."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher


class Grammars:
    """Compiles grammars for one model's vocabulary. Thread-safe.

    It keeps the grammars that were used last, and those of all matchers that still live.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of the model's logits.
        end_tokens: tokens that end a text; they are allowed where the grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._living: weakref.WeakValueDictionary[Grammar, _Compiled] = (
            weakref.WeakValueDictionary()
        )
        self._characters = 0  # in their texts
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
            compiled = _Compiled(self._compile(grammar))
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
            self._characters += _characters(grammar)
        self._kept.move_to_end(grammar)
        while len(self._kept) > _KEPT or self._characters > _KEPT_CHARACTERS:
            oldest, _ = self._kept.popitem(last=False)
            self._characters -= _characters(oldest)

    @property
    def _words(self) -> int:
        size = self._vocab_size if self._vocabulary is None else self._vocabulary.vocab_size
        return -(-size // _WORD)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if _characters(grammar) > MOST_CHARACTERS:
            raise GrammarError(f"it has more than {MOST_CHARACTERS} characters")
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        try:
            source = _source(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(str(error)) from None
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=_LIMITS)
        _check(matcher)
        # The first mask shows whether no token is allowed, or the grammar is too complex.
        Matcher(matcher.deep_copy(), self._words, self._end_tokens).masks(())
        return matcher

    def _make_vocabulary(self) -> LLTokenizer:
        try:
            size = max(self._vocab_size, 1 + max(self._tokenizer.vocabulary().values()))
            return LLTokenizer(
                self._tokenizer.as_json(), n_vocab=size, eos_token=sorted(self._end_tokens)
            )
        except Exception as error:  # the library raises errors of several classes
            raise GrammarError(f"this model's tokenizer takes no grammars: {error}") from error


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
        """Return up to `most` tokens that must follow: each is the only one allowed at its place.

        End tokens are not returned; the target chooses them.

        Raises:
            GrammarError: the grammar is too complex to be followed.
        """
        found: list[int] = []
        mask = self._mask()
        while len(found) < most:
            token = _only(mask)
            if token is None or token in self._end_tokens:
                break
            self._matcher.consume_token(token)
            found.append(token)
            if self.complete:
                break
            mask = self._fill(mask.copy())
        self._matcher.rollback(len(found))
        return tuple(found)

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


def _characters(grammar: Grammar) -> int:
    return len(grammar.text) + (len(grammar.said.text) if grammar.said else 0)


def _only(mask: Masks) -> int | None:
    """Return the only token of a mask; None if it has none or several."""
    (places,) = mask.nonzero()
    if len(places) != 1:
        return None
    word = int(mask[places[0]])
    return None if word & (word - 1) else int(places[0]) * _WORD + word.bit_length() - 1


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise GrammarError("it allows no text" if reason == "NoExtensionBias" else reason)


def _source(grammar: Grammar) -> str:
    """Return the grammar in the form that the library takes."""
    source: str
    match grammar.kind:
        case GrammarKind.JSON_OBJECT | GrammarKind.JSON_SCHEMA:
            text = "{}" if grammar.text.strip() == "true" else grammar.text  # both allow everything
            source = LLMatcher.grammar_from_json_schema(text, defaults=LAYOUT)
        case GrammarKind.REGEX:
            source = LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            options = map(json.dumps, json.loads(grammar.text))
            source = LLMatcher.grammar_from_lark("start: " + " | ".join(options))
        case GrammarKind.LARK:
            source = LLMatcher.grammar_from_lark(grammar.text)
    if grammar.said is not None:
        parts = [{"lark_grammar": source}, {"name": "said", **_part(_source(grammar.said))}]
        source = json.dumps({"grammars": parts})
    return source


def _part(source: str) -> dict[str, object]:
    """Return a grammar in the library's form as one of several."""
    if not source.startswith("{"):
        return {"lark_grammar": source}
    (part,) = json.loads(source)["grammars"]
    return {key: value for key, value in part.items() if key != "name"}
