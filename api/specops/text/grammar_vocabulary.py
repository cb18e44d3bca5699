"""A model's tokens in the grammar library's form, made once for all of the model's grammars.

The library could read `tokenizer.json` itself. But then it keeps a second tokenizer, and each
token's bytes twice: 231 MB for the 262,144 tokens of Gemma 3, and 360 MB while it reads them.
So it gets the tokens' bytes, and calls our tokenizer to split text: 89 MB, and 119 MB at its peak.
"""

import threading

from llguidance import LLTokenizer

from specops.text.grammar_source import SPECIAL, vocabulary_of
from specops.text.tokenizer import Tokenizer

# For each of these sets of tokens the library keeps a mask, and a tree of the tokens outside it.
# The set of spaces is left out: it takes a sixth of the memory, and our JSON has no free spaces.
_SLICES = LLTokenizer.general_slices()[1:]
_TOKEN_BYTES = 340  # measured: 339 for Gemma 3, 300 for SmolLM2
# The process that tries grammars has a token for each byte, and empty places for all others.
_TRIAL_BYTES, _TRIAL_TOKEN_BYTES = 20 << 20, 44


def vocabulary_bytes(tokens: int) -> int:
    """Return the bytes of a vocabulary in the library's form; making it takes a third more."""
    return tokens * _TOKEN_BYTES


def grammar_bytes(tokens: int) -> int:
    """Return the bytes that grammars over a vocabulary need, the grammars themselves excluded."""
    return vocabulary_bytes(tokens) + _TRIAL_BYTES + tokens * _TRIAL_TOKEN_BYTES


class UnsupportedTokenizer(ValueError):  # noqa: N818 - the name says enough
    """The model's tokenizer does not support grammars; the message says why."""


class GrammarVocabulary:
    """The grammar library's form of one model's vocabulary. Thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        vocab_size: number of the model's logits.
        end_tokens: tokens that end a text.

    Attributes:
        size: number of tokens in a mask: as many as logits, perhaps more once the form is made.
        refused: why the model has no grammars; None if it has them or none was used yet.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = sorted(end_tokens)
        self.size = vocab_size
        self.refused: str | None = None
        self._made: LLTokenizer | None = None
        self._making = threading.Lock()

    def get(self) -> LLTokenizer:
        """Return the library's form; the first call makes it.

        Making it takes 0.1 s for 49,152 tokens and 1 s for 262,144, most of it with Python's global
        lock held.

        Raises:
            UnsupportedTokenizer: the library cannot read the tokenizer.
        """
        with self._making:
            if self._made is None and self.refused is None:
                try:
                    self._made = self._make()
                except BaseException as error:  # the library's panics: their class has no name
                    self.refused = f"this model's tokenizer does not support grammars: {error}"
        if self._made is None:
            raise UnsupportedTokenizer(self.refused)
        return self._made

    def _make(self) -> LLTokenizer:
        if not self._end_tokens:
            raise ValueError("no token ends a text")
        tokenizer, marks = self._tokenizer, set(self._tokenizer.marks.values())
        self.size = max(self.size, 1 + max(tokenizer.vocabulary().values()))
        spelled = (tokenizer.spelling(token)[1] for token in range(self.size))
        tokens = [SPECIAL * (token in marks) + text for token, text in enumerate(spelled)]
        return vocabulary_of(tokens, self._end_tokens, tokenizer.encode_further, _SLICES)
