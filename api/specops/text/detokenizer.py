"""Decodes tokens to text while they are generated."""

from codecs import utf_8_decode
from collections.abc import Sequence

from specops.text.tokenizer import Tokenizer

_CHARACTER_BYTES = 4  # of UTF-8's longest character, which thus has at most as many tokens


class IncrementalDetokenizer:
    """Decodes a growing sequence token by token; never returns a part of a UTF-8 character.

    A token adds the same bytes everywhere, except for the space that a text must not begin with. So
    earlier tokens are not decoded again. A token can end one character and begin the next: the
    first is returned, the second waits. Invalid bytes become U+FFFD.

    Args:
        tokenizer: the model's tokenizer.
        prompt_tokens: tokens before the generated ones.

    Attributes:
        rest: bytes of an incomplete character at the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: Sequence[int]) -> None:
        self._shown = tokenizer.shown
        self._begins = tokenizer.drops_first_space and not any(map(self._shown, prompt_tokens))
        self.rest = b""
        for token in prompt_tokens[1 - _CHARACTER_BYTES :]:
            self.push(token)

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes, empty within a character."""
        new = self._shown(token)
        if self._begins and new:
            self._begins = False
            new = new.removeprefix(" ") if isinstance(new, str) else new.removeprefix(b" ")
        if isinstance(new, str):
            if not self.rest:
                return new
            new = new.encode()
        new = self.rest + new
        text, used = utf_8_decode(new, "replace", False)
        self.rest = new[used:]
        return text

    def flush(self) -> str:
        """Return the text of an incomplete character at the end."""
        rest, self.rest = self.rest, b""
        return rest.decode(errors="replace")
