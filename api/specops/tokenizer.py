"""Text to tokens and back, and back again while the tokens are still coming."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

_REPLACEMENT = "\ufffd"
_CHARACTER_TOKENS = 4  # a UTF-8 character has at most 4 bytes, so at most 4 tokens
_WINDOW_TOKENS = 16  # decoded again for each token; cut back when longer
_CONTEXT_TOKENS = 6  # prompt tokens that tell how the first generated token is spelled


class TokenizerError(RuntimeError):
    """A tokenizer that cannot be loaded."""


class Tokenizer:
    """A model's `tokenizer.json`. Thread-safe: `tokenizers` keeps no state between calls."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a model folder's tokenizer.

        Raises:
            TokenizerError: `tokenizer.json` is missing or broken.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json")
        try:
            return cls(FastTokenizer.from_file(str(path)))
        except Exception as error:  # the Rust library raises bare Exception
            raise TokenizerError(f"{path} cannot be read: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, with the special tokens that the model expects around it."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Every entry with its id, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)


class IncrementalDetokenizer:
    """Text of a growing sequence, token by token, never half a UTF-8 character.

    How a token is spelled can depend on those before it (a leading space, a character of several
    byte tokens), so each step decodes a short window that ends with the new token, and shows what
    was not there before.

    Args:
        tokenizer: the model's.
        prompt_tokens: what the generated tokens follow.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_tokens[-_CONTEXT_TOKENS:])
        self._shown = len(self._window)  # tokens of the window whose text is out
        self._shown_text = tokenizer.decode(self._window)

    @property
    def incomplete(self) -> bool:
        """The last tokens are the beginning of a character."""
        return len(self._window) > self._shown

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes, empty inside of a character."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        pending = len(self._window) - self._shown
        if text.endswith(_REPLACEMENT) and pending < _CHARACTER_TOKENS:
            return ""
        return self._show(text)

    def flush(self) -> str:
        """The text of an unfinished character at the end."""
        return self._show(self._tokenizer.decode(self._window))

    def _show(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        if len(self._window) > _WINDOW_TOKENS:
            del self._window[: self._shown]
            text = self._tokenizer.decode(self._window)
        self._shown = len(self._window)
        self._shown_text = text
        return new
