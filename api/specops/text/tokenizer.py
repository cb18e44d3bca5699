"""Text to tokens and back. `detokenizer` does it while tokens are still coming."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

_BYTE_ENTRY = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's spelling of one byte
_SPACE = "\u2581"  # SentencePiece's sign for a space


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
