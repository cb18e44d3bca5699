"""Compiles the grammars of answers, and computes masks of the tokens that may come next.

The library llguidance follows a grammar byte by byte. `grammar_process` writes and tries a grammar
in a process with limits; a grammar within them is compiled here, for the model's vocabulary.
Compiled grammars are cached per client. Each request gets its own matcher, a copy that takes
microseconds.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from specops.request import Grammar
from specops.text.grammar_process import SHARED, GrammarProcess, Tried
from specops.text.grammar_source import LIMITS, STACK_BYTES, GrammarError, IgnoredKeyword, check
from specops.text.grammar_vocabulary import GrammarVocabulary, UnsupportedTokenizer
from specops.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Masks = npt.NDArray[np.uint32]
_T = TypeVar("_T")
_KEPT = 64  # cached grammars
_KNOWN_SECONDS = 1e-4  # for a mask of known states
_GROWTH = 150e6  # bytes that a second of other masks adds
_MAX_GROWN = 8 << 20  # bytes of all states
_WORD = 32  # tokens in a word of a mask
_PROBED = 8  # masks computed before a grammar is accepted
# Processor seconds, while all requests wait. Honest schemas take less than one millisecond.
_MASK_SECONDS = 0.02  # one mask
_READING_SECONDS = 0.03  # maximum that one reading counts, as it may include a machine's pause
_CALL_SECONDS = 0.05  # all masks of one pass
_SHARE = 0.25  # of the passes' time, on average
_MIN_SECONDS = 0.002  # in each pass, however short
_CREDIT_SECONDS = 0.1  # by which a request may exceed its share


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Compiled:
    """A compiled grammar, which matchers share.

    Attributes:
        matcher: the library's, at the start of the grammar; it is only copied.
        bytes: its memory when it was compiled.
        ignored: keywords that answers need not follow.
        grown: bytes that masks have added since, estimated from their time.
        worn: whether it has no room for more masks; new requests then compile it again.
    """

    matcher: LLMatcher
    bytes: int = 0
    ignored: tuple[IgnoredKeyword, ...] = ()
    grown: float = 0.0
    worn: bool = False

    def masked(self, seconds: float) -> None:
        """Note how long a mask took."""
        grown = self.grown + _GROWTH * max(0.0, seconds - _KNOWN_SECONDS)
        self.grown = min(grown, _MAX_GROWN)


_Key = tuple[str, Grammar]  # the name of the client's key, and the grammar


class Grammars:
    """Compiles grammars for one model's vocabulary. Thread-safe.

    It keeps the most recently used grammars, and those of all live matchers. Clients with keys
    share none, since a cached grammar would reveal what another client requested.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of the model's logits.
        end_tokens: tokens that end a text; they are allowed where the grammar is complete.
        process: tries grammars.

    Attributes:
        vocabulary: the library's form of the tokens.
        most_bytes: maximum memory of cached grammars.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        end_tokens: frozenset[int],
        process: GrammarProcess = SHARED,
    ) -> None:
        self.vocabulary = GrammarVocabulary(tokenizer, vocab_size, end_tokens)
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._process = process
        self._kept: OrderedDict[_Key, _Compiled] = OrderedDict()
        self._living: weakref.WeakValueDictionary[_Key, _Compiled] = weakref.WeakValueDictionary()
        self.most_bytes = 64 << 20
        self._named: set[str] = set()  # keywords that the log has named
        self._lock = threading.Lock()  # for the cache: the engine never waits for a compilation
        self._compiling = threading.Lock()

    def matcher(self, grammar: Grammar, client: str = "") -> Matcher:
        """Return a matcher at the start of a client's grammar; compile it if it is not cached.

        Raises:
            GrammarError: the grammar is wrong, exceeds a limit or allows no text, or the library
                does not support the model's tokenizer.
            ProgramProcessError: see `GrammarProcess`.
        """
        if (matcher := self.compiled(grammar, client)) is not None:
            return matcher
        with self._compiling:
            if (matcher := self.compiled(grammar, client)) is not None:
                return matcher
            compiled = self._compile(grammar)
        with self._lock:
            self._keep((client, grammar), compiled)
            return self._matcher(compiled)

    def compiled(self, grammar: Grammar, client: str = "", *, worn: bool = False) -> Matcher | None:
        """Return a matcher at the start of a grammar; None if it has to be compiled first.

        Args:
            grammar, client: see `matcher`.
            worn: accept one that other answers have worn out, for the engine, which never compiles.
        """
        with self._lock:
            compiled = self._living.get((client, grammar))
            if compiled is None or (compiled.worn and not worn):
                return None
            self._keep((client, grammar), compiled)
            return self._matcher(compiled)

    def stop(self) -> None:
        """End the running compilation: its client has left."""
        self._process.stop()

    def _matcher(self, compiled: _Compiled) -> Matcher:
        copy = compiled.matcher.deep_copy()
        return Matcher(copy, self._words, self._end_tokens, compiled)

    def _keep(self, key: _Key, compiled: _Compiled) -> None:
        self._living[key] = self._kept[key] = compiled
        self._kept.move_to_end(key)
        taken = sum(item.bytes + item.grown for item in self._kept.values())
        while len(self._kept) > _KEPT or taken > self.most_bytes:
            _, oldest = self._kept.popitem(last=False)
            taken -= oldest.bytes + oldest.grown

    @property
    def _words(self) -> int:
        return -(-self.vocabulary.size // _WORD)

    def _compile(self, grammar: Grammar) -> _Compiled:
        try:
            vocabulary = self.vocabulary.get()
        except UnsupportedTokenizer as error:
            raise GrammarError(str(error)) from error
        reason: GrammarError | None = None
        effort, marks = 0, self._tokenizer.marks
        while True:
            try:
                tried = self._process.tried(grammar, effort, marks, vocabulary.vocab_size)
            except GrammarError as error:
                raise reason or error from None
            try:
                compiled = _on_large_stack(partial(self._made, vocabulary, tried))
            except GrammarError as error:
                reason, effort = reason or error, tried.effort + 1
                continue
            self._log_once(tried.ignored)
            return compiled

    def _made(self, vocabulary: LLTokenizer, tried: Tried) -> _Compiled:
        matcher = LLMatcher(vocabulary, tried.text, log_level=0, limits=LIMITS)
        check(matcher)
        compiled = _Compiled(matcher, tried.bytes, tried.ignored)
        self._matcher(compiled).probe()
        return compiled

    def _log_once(self, ignored: Sequence[IgnoredKeyword]) -> None:
        """Log each keyword that is not enforced, once."""
        for item in ignored:
            keyword = item.path.rpartition("/")[2] or "schema"
            if keyword not in self._named:
                self._named.add(keyword)
                log.warning(
                    "a JSON schema's `%s` is not enforced everywhere; answers say where in "
                    "X-Ignored-Fields",
                    keyword,
                )


def _on_large_stack(work: Callable[[], _T]) -> _T:
    """Do work on a thread with more stack than `grammar_worker` has."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    before = threading.stack_size(4 * STACK_BYTES)
    try:
        threading.Thread(target=run, name="compile").start()
    finally:  # a thread that another one starts meanwhile only gets a larger stack
        threading.stack_size(before)
    return done.result()


class Matcher:
    """The position of one answer in its grammar. Used by one thread.

    All requests wait while it works, so its processor time is counted. A request whose grammar
    takes more than its share of the passes ends with an error.

    Args:
        matcher: the library's, at the start of the grammar.
        words: number of words in a mask.
        end_tokens: tokens that end a text.
        compiled: the matcher's original, which stays cached as long as the matcher lives.
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
        self._certain: list[int] | None = None  # forced tokens, last first, once computed
        self._credit = _CREDIT_SECONDS

    @property
    def ignored(self) -> tuple[IgnoredKeyword, ...]:
        """The keywords of JSON schemas that the answer does not have to follow."""
        return () if self._compiled is None else self._compiled.ignored

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow."""
        return self._matcher.is_stopped()

    def allows(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens the grammar allows, from the first on."""
        with self._counted():
            allowed: int = self._matcher.validate_tokens(list(tokens))
        return allowed

    def advance(self, token: int) -> None:
        """Add a token of the answer.

        Raises:
            GrammarError: the grammar does not allow it, or is too complex to follow.
        """
        with self._counted():
            if not self._matcher.consume_token(token):
                self._check()
                raise GrammarError(f"token {token} is not allowed here")
        self._now = None
        if self._certain and self._certain.pop() != token:
            self._certain = None
        self._certain = self._certain or None

    def forced(self, most: int) -> tuple[int, ...]:
        """Return up to `most` forced tokens: each is the only one allowed at its position.

        It never returns end tokens, which the target chooses.

        Raises:
            GrammarError: the grammar is too complex to follow.
        """
        forced: list[int] = []
        for token in reversed(self._must_follow()[-most:] if most else ()):
            if token in self._end_tokens:
                break
            forced.append(token)
        return tuple(forced)

    def masks(self, tokens: Sequence[int], forced: Sequence[int] = ()) -> Masks:
        """Return masks of the allowed tokens after `forced`, and after each of `tokens`.

        Args:
            tokens: [k]; after the first one that ends the text or is not allowed, the masks allow
                all tokens.
            forced: allowed tokens that come before them.

        Returns:
            [k + 1, words]; token i is bit i % 32 of word i // 32.

        Raises:
            GrammarError: the grammar is too complex to follow.
        """
        masks = np.full((len(tokens) + 1, self._words), ~np.uint32(0))
        certain = self._must_follow()
        taken = len(forced)
        with self._counted() as check_time:
            self._matcher.consume_tokens(list(forced))
            for row, mask in enumerate(masks):
                known = certain[-1 - taken] if taken < len(certain) else None
                if known is not None:
                    _only(mask, known)
                elif taken:
                    self._fill(mask)
                else:
                    mask[:] = self._mask()
                check_time()
                if row == len(tokens) or tokens[row] in self._end_tokens:
                    break
                if known not in (None, tokens[row]):
                    break
                if not self._matcher.try_consume_tokens([tokens[row]]):
                    break
                taken += 1
            self._matcher.rollback(taken)
        return masks

    def settle(self, seconds: float) -> None:
        """Credit the request's grammar with its share of a pass's seconds.

        Raises:
            GrammarError: the grammar has taken more than its share of the passes.
        """
        self._credit += max(_MIN_SECONDS, _SHARE * seconds)
        self._credit = min(self._credit, _CREDIT_SECONDS)
        if self._credit < 0:
            raise GrammarError(f"following it takes more than {_SHARE:.0%} of the model's time")

    def probe(self) -> None:
        """Follow the grammar for some tokens, to measure how long its masks take.

        Raises:
            GrammarError: they take too long, or it allows no text.
        """
        draw = random.Random(0)  # nosec B311: not a secret
        slow = 0
        self._mask()  # slower than later ones, which reuse its states
        for step in range(_PROBED):
            bits = np.unpackbits(self._mask().view(np.uint8), bitorder="little")
            allowed = [token for token in bits.nonzero()[0] if token not in self._end_tokens]
            if not allowed or self.complete:
                return
            begun = time.thread_time()
            try:
                self.advance(int(draw.choice(allowed)))
                self._mask()
            except GrammarError:
                if not step:
                    raise
                return  # other texts may be simple enough
            seconds = time.thread_time() - begun
            slow += seconds > _MASK_SECONDS
            if slow > 1:  # one may be a machine's pause
                raise GrammarError(
                    f"following it takes {1000 * seconds:.0f} ms per token; "
                    f"at most {1000 * _MASK_SECONDS:.0f} ms are allowed"
                )

    def _must_follow(self) -> Sequence[int]:
        """Return the forced tokens, the last one first."""
        if self._certain is None:
            with self._counted():
                self._certain = self._matcher.compute_ff_tokens()[::-1]
                self._check()
        return self._certain

    def _mask(self) -> Masks:
        """Return the mask of the next token."""
        if self._now is None:
            self._now = self._fill(np.empty(self._words, np.uint32))
        return self._now

    def _fill(self, mask: Masks) -> Masks:
        """Write the mask at the library's current position."""
        begun = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._compiled is not None:
            self._compiled.masked(time.thread_time() - begun)
        self._check()
        return mask

    def _check(self) -> None:
        """Raise the library's error, if there is one."""
        try:
            check(self._matcher)
        except GrammarError:
            if self._compiled is not None:
                self._compiled.worn = True
            raise

    @contextmanager
    def _counted(self) -> Iterator[Callable[[], None]]:
        """Count the processor time of a block; the yielded function ends a slow block."""
        begun, spent = time.thread_time(), 0.0

        def read() -> None:
            nonlocal begun, spent
            now = time.thread_time()
            spent += min(now - begun, _READING_SECONDS)
            begun = now

        def check_time() -> None:
            read()
            if spent > _CALL_SECONDS:
                raise GrammarError(
                    f"following it takes more than {1000 * _CALL_SECONDS:.0f} ms in one pass"
                )

        try:
            yield check_time
        finally:
            read()
            self._credit -= spent


def _only(mask: Masks, token: int) -> None:
    """Have a mask allow one token."""
    mask[:] = 0
    mask[token // _WORD] = np.uint32(1 << token % _WORD)
