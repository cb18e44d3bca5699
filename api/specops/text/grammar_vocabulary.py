"""A model's tokens as the grammar library takes them: made once, for all grammars of the model."""

from __future__ import annotations

import threading

from llguidance import LLTokenizer

from specops.text.tokenizer import Tokenizer


class UnsupportedTokenizer(ValueError):  # noqa: N818 - named as what it says
    """The grammar library does not take the model's tokenizer; the message says why."""


class GrammarVocabulary:
    """The grammar library's form of one model's vocabulary. Thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of the model's logits.
        end_tokens: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._made: LLTokenizer | None = None
        self._making = threading.Lock()

    @property
    def size(self) -> int:
        """Number of tokens in a mask: the model's logits, or more once the library has read it."""
        return self._vocab_size if self._made is None else self._made.vocab_size

    def get(self) -> LLTokenizer:
        """Return the library's form; the first call makes it.

        Raises:
            UnsupportedTokenizer: see there.
        """
        with self._making:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> LLTokenizer:
        try:
            size = max(self._vocab_size, 1 + max(self._tokenizer.vocabulary().values()))
            return LLTokenizer(
                self._tokenizer.as_json(), n_vocab=size, eos_token=sorted(self._end_tokens)
            )
        except Exception as error:  # the library raises errors of several classes
            raise UnsupportedTokenizer(
                f"this model's tokenizer does not support grammars: {error}"
            ) from error
