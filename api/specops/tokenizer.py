"""Text to tokens and back, and back again while the tokens are still coming."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

_REPLACEMENT = "\ufffd"
_CHARACTER_TOKENS = 4  # a UTF-8 character has at most 4 bytes, so at most 4 tokens
_WINDOW_TOKENS = 16  # decoded again for each token; cut back when longer
_BYTE_ENTRY = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's spelling of one byte
_SPACE = "\u2581"  # SentencePiece's sign for a space
_CONTEXT_TOKENS = 6  # prompt tokens that tell how the first generated token is spelled


class TokenizerError(RuntimeError):
    """A tokenizer that cannot be loaded."""


class Tokenizer:
    """A model's `tokenizer.json`. Thread-safe: `tokenizers` keeps no state between calls."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        decoder = tokenizer.decoder
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

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

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Tokens of a text, with the special tokens that the model expects around it.

        Args:
            text: special tokens that are spelled out in it count as such.
            special_tokens: False where the text has them already, as a chat template writes them.
        """
        return tuple(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def spelling(self, token: int) -> tuple[str, bytes]:
        r"""How one token is spelled, whatever stands around it.

        Returns:
            Its text and its bytes. The text of bytes that are no whole characters says so:
            `bytes:\xe2\x82`.
        """
        entry = self._added.get(token)
        if entry is not None:
            spelled = entry.encode()
        else:
            spelled = self._entry_bytes(self._tokenizer.id_to_token(token) or "")
        try:
            return spelled.decode(), spelled
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled), spelled

    def _entry_bytes(self, entry: str) -> bytes:
        if self._byte_level:
            return bytes(_BYTES[letter] for letter in entry)
        if found := _BYTE_ENTRY.fullmatch(entry):
            return bytes([int(found[1], 16)])
        return entry.replace(_SPACE, " ").encode()

    def vocabulary(self) -> dict[str, int]:
        """Every entry with its id, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)


def _bytes_by_letter() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others follow 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _bytes_by_letter()


class IncrementalDetokenizer:
    """Text of a growing sequence, token by token, never a part of a UTF-8 character.

    How a token is spelled can depend on those before it (a leading space, a character of several
    byte tokens), so each step decodes a short window that ends with the new token, and shows what
    was not there before. A token can end one character and begin the next: the first is shown, the
    second waits. The window begins where a character does: decoders turn a run of byte tokens
    that begins inside of one into replacement characters as a whole.

    Args:
        tokenizer: the model's.
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
