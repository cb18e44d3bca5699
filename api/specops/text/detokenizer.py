"""Tokens to text while the tokens are still coming."""

from __future__ import annotations

from collections.abc import Sequence

from specops.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CHARACTER_TOKENS = 4  # a UTF-8 character has at most 4 bytes, so at most 4 tokens
_WINDOW_TOKENS = 16  # decoded again for each token; cut back when longer
_CONTEXT_TOKENS = 6  # prompt tokens that tell how the first generated token is spelled


class IncrementalDetokenizer:
    """Text of a growing sequence, token by token, never a part of a UTF-8 character.

    How a token is spelled can depend on those before it (a leading space, a character of several
    byte tokens), so each step decodes a short window that ends with the new token, and shows what
    was not there before. A token can end one character and begin the next: the first is shown, the
    second waits. The window begins where a character does: decoders turn a run of byte tokens
    that begins inside of one into replacement characters as a whole.

    Args:
        prompt_tokens: what the generated tokens follow.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _context(tokenizer, prompt_tokens)
        self._shown_text = tokenizer.decode(self._window)
        self._boundary = len(self._window)  # tokens of the window before the last whole character
        self._pending = 0  # tokens since a character was completed

    @property
    def incomplete(self) -> bool:
        """The last tokens end with the beginning of a character."""
        return self._pending > 0

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes, empty inside of a character."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT):
            whole = text.rstrip(_REPLACEMENT)
            if len(whole) > len(self._shown_text):
                self._pending = 1
                return self._show(whole)
            self._pending += 1
            if self._pending < _CHARACTER_TOKENS:
                return ""
        self._pending = 0
        new = self._show(text)
        self._cut_window()
        return new

    def flush(self) -> str:
        """The text of an unfinished character at the end."""
        self._pending = 0
        return self._show(self._tokenizer.decode(self._window))

    def _show(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        self._shown_text = text
        return new

    def _cut_window(self) -> None:
        """Keep the window short. It must spell something, or else the next space would be lost."""
        if len(self._window) > _WINDOW_TOKENS:
            rest = self._window[self._boundary :]
            text = self._tokenizer.decode(rest)
            if text and self._shown_text.endswith(text):
                self._window, self._shown_text = rest, text
        self._boundary = len(self._window)


def _context(tokenizer: Tokenizer, prompt_tokens: Sequence[int]) -> list[int]:
    """The end of a prompt that tells how the next token is spelled: whole characters, some text."""
    whole = tokenizer.decode(prompt_tokens)
    for count in range(_CONTEXT_TOKENS, 2 * _CONTEXT_TOKENS):
        text = tokenizer.decode(prompt_tokens[-count:])
        if whole.endswith(text) and (text or not whole):
            return list(prompt_tokens[-count:])
    return list(prompt_tokens)
