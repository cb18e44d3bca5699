"""Text to tokens and back. `detokenizer` decodes tokens as they are generated."""

import json
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from specops.text.added_tokens import add_missing
from specops.text.cuts import PART, Cuts
from specops.text.files import TOKENIZER

_BYTE_ENTRY = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's spelling of one byte
# The letters of a key may be spelled as escapes.
_MAY_HAVE_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]|\\u00[4-7]')
_SPACE = "\u2581"  # SentencePiece's sign for a space
# Words whose tokens the library caches, for each thread. Its default, 10,000, takes 80 MB if they
# are long, and is no faster.
_CACHED_WORDS = 512
_MAX_SHOWN = 1 << 14  # tokens whose bytes are cached: 2.5 MB; all 262,144 would take 40 MB


class TokenizerError(RuntimeError):
    """A tokenizer cannot be loaded, or fails on a text."""


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Turn a panic of the Rust library into an ordinary error, which ends one request."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:  # `pyo3_runtime.PanicException`, which no module exports
        if type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"the tokenizer failed: {error}") from error


class Tokenizer:
    """A model's `tokenizer.json`. Thread-safe.

    Attributes:
        drops_first_space: whether a decoded text leaves out the space at the start of its first
            token.

    Raises:
        TokenizerError: the decoder is of an unknown kind.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        if hasattr(tokenizer.model, "_resize_cache"):
            tokenizer.model._resize_cache(_CACHED_WORDS)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {index: token.content for index, token in added.items() if token.special}
        # llguidance treats all added tokens of this form as special.
        self._marks = {
            token.content: index
            for index, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        }
        self._shown: dict[int, str | bytes] = {}  # cache of `shown`
        self._plain: dict[frozenset[str], FastTokenizer] = {}  # cache of `encode_as_text`
        self._decoder = decoder = tokenizer.decoder
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        shown = decoder.decode([f"{_SPACE}a", f"{_SPACE}b"]) if decoder is not None else ""
        if not self._byte_level and shown.removeprefix(" ") != "a b":
            raise TokenizerError(
                "its decoder is neither byte-level nor SentencePiece's, so the text of a single "
                "token is unknown"
            )
        self._byte_fallback = not self._byte_level and decoder.decode(["a", "<0x62>"]) == "ab"
        self.drops_first_space = not self._byte_level and shown == "a b"

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a model folder's tokenizer: tokenizer.json and the tokens of `added_tokens`.

        Raises:
            TokenizerError: `tokenizer.json` is missing or broken.
        """
        path = folder / TOKENIZER
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json")
        try:
            # As bytes: a `str` with one emoji takes four times as much memory.
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
            ):
                if _MAY_HAVE_PREFIX.search(text):
                    _check_prefix(json.loads(bytes(text)))
            with _panics_are_errors():
                tokenizer = FastTokenizer.from_file(str(path))
                tokenizer.no_truncation()  # a published file may truncate and pad every text
                tokenizer.no_padding()
                add_missing(tokenizer, folder)
                return cls(tokenizer)
        except Exception as error:  # the Rust library raises bare Exception
            raise TokenizerError(f"{path} cannot be read: {error}") from error

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Return the tokens of a text, with the special tokens that the model expects around it.

        Args:
            text: the text; a special token that it spells out becomes that token.
            special_tokens: False if the text already has them, as from a chat template.
        """
        return tuple(chain.from_iterable(self.parts(text, special_tokens=special_tokens)))

    def parts(self, text: str, *, special_tokens: bool = True) -> Iterator[list[int]]:
        """Yield the tokens that `encode` returns; of a long text, a few thousand at a time.

        Raises:
            UncutText: a long text has nowhere to be cut.
        """
        return self._parts(self._tokenizer, text, special_tokens=special_tokens)

    def _parts(
        self, tokenizer: FastTokenizer, text: str, *, special_tokens: bool = False
    ) -> Iterator[list[int]]:
        parts = self.cuts.parts(text) if len(text) > PART else ()
        if len(parts) < 2:
            yield _encoded(tokenizer, text, special_tokens=special_tokens)
            return
        begin, end = self._around if special_tokens else ([], [])
        yield begin
        for last, part in parts:
            tokens = _encoded(tokenizer, last + part)
            yield tokens[len(_encoded(tokenizer, last)) :] if last else tokens
        yield end

    @cached_property
    def cuts(self) -> Cuts:
        """Where long texts may be cut."""
        return Cuts(self._tokenizer)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens before a text and after it."""
        plain, marked = (
            _encoded(self._tokenizer, "a", special_tokens=special) for special in (False, True)
        )
        begin = next(n for n in range(len(marked)) if marked[n : n + len(plain)] == plain)
        return marked[:begin], marked[begin + len(plain) :]

    @cached_property
    def begin(self) -> tuple[int, ...]:
        """The special tokens that begin every text of the model."""
        return tuple(self._around[0])

    def encode_as_text(self, text: str, marks: frozenset[str]) -> tuple[int, ...]:
        """Return the tokens of a text, with special tokens and these marks as plain text."""
        if (plain := self._plain.get(marks)) is None:
            plain = self._plain[marks] = self._without(marks)
        return tuple(chain.from_iterable(self._parts(plain, text)))

    def _without(self, marks: frozenset[str]) -> FastTokenizer:
        """Return this tokenizer, with the same model, without special tokens and these marks."""
        plain = FastTokenizer(self._tokenizer.model)
        plain.normalizer = self._tokenizer.normalizer
        plain.pre_tokenizer = self._tokenizer.pre_tokenizer
        tokens = _added(self._tokenizer)
        for token in tokens:
            token.special = token.special or token.content in marks
        plain.add_tokens(tokens)
        plain.encode_special_tokens = True  # by their letters
        return plain

    def encode_further(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text that continues another: no space is put before it."""
        return tuple(_encoded(self._further, text))

    @cached_property
    def _further(self) -> FastTokenizer:
        """This tokenizer, with the same model, without the step that puts a space before a text."""
        whole = self._tokenizer
        states = [_state(whole.normalizer), _state(whole.pre_tokenizer)]
        kept = [*map(_without_prefix, states)]
        if kept == states:
            return whole
        further = FastTokenizer(whole.model)
        further.normalizer = _part(normalizers.Sequence, kept[0])
        further.pre_tokenizer = _part(pre_tokenizers.Sequence, kept[1])
        further.add_tokens(_added(whole))
        return further

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens; with `special`, special tokens are spelled out."""
        with _panics_are_errors():
            return self._tokenizer.decode(tokens, skip_special_tokens=not special)

    def spelling(self, token: int) -> tuple[str, bytes]:
        r"""Return the text and the bytes of one token, independent of its neighbours.

        Bytes that are not whole characters get a text such as `bytes:\xe2\x82`.
        """
        special = self._special.get(token)
        spelled = self._bytes(token) if special is None else special.encode()
        try:
            return spelled.decode(), spelled
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled), spelled

    def shown_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; none for special and unknown tokens."""
        shown = self.shown(token)
        return shown.encode() if isinstance(shown, str) else shown

    def shown(self, token: int) -> str | bytes:
        """Return a token's part of a text; bytes where they are not whole characters."""
        if (shown := self._shown.get(token)) is None:
            if len(self._shown) >= _MAX_SHOWN:
                self._shown = {}
            shown = b"" if token in self._special else self._bytes(token)
            with suppress(UnicodeDecodeError):
                shown = shown.decode()
            self._shown[token] = shown
        return shown

    def _bytes(self, token: int) -> bytes:
        """Return the bytes that a token, added ones included, decodes to after another token."""
        entry = self._tokenizer.id_to_token(token) or ""
        if self._byte_level:
            try:
                return bytes([_BYTES[letter] for letter in entry])
            except KeyError:  # an entry that does not use these letters
                return entry.encode()
        if self._byte_fallback and (byte := _BYTE_ENTRY.fullmatch(entry)):
            return bytes([int(byte[1], 16)])
        text: str = self._decoder.decode(["a", entry])
        return text[1:].encode()

    def token(self, text: str) -> int | None:
        """Return the token with this spelling, special tokens included; None if there is none."""
        return self._tokenizer.token_to_id(text)

    @property
    def marks(self) -> Mapping[str, int]:
        """The tokens that a grammar names, by their texts; it spells other marks in letters."""
        return self._marks

    def vocabulary(self) -> dict[str, int]:
        """Return every entry with its id, added tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)


def _encoded(tokenizer: FastTokenizer, text: str, *, special_tokens: bool = False) -> list[int]:
    # As a batch: `encode` would hold Python's global lock, for 2 s with 1 MB of text.
    with _panics_are_errors():
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
    tokens: list[int] = encoding.ids
    return tokens


def _added(tokenizer: FastTokenizer) -> list[AddedToken]:
    """Copy the added tokens, in an order in which another tokenizer gives them the same ids."""
    added = tokenizer.get_added_tokens_decoder()
    return [added[index] for index in sorted(added)]


def _state(part: Any) -> Any:
    """Return a tokenizer's part as in `tokenizer.json`; None if there is none."""
    return None if part is None else json.loads(part.__getstate__())


def _part(kind: type[Any], state: Any) -> Any:
    """Return the part with this `_state`; `kind` is the `Sequence` class of such parts."""
    if state is None:
        return None
    part = kind([])
    part.__setstate__(json.dumps(state).encode())
    return part


def _without_prefix(state: Any) -> Any:
    """Return a part without the step that puts SentencePiece's space first; None if that is all."""
    if state is None or state["type"] == "Prepend":
        return None
    if state["type"] == "Metaspace":
        return {**state, "prepend_scheme": "never"}
    for name in {"normalizers", "pretokenizers"} & state.keys():
        parts = map(_without_prefix, state[name])
        return {**state, name: [part for part in parts if part is not None]}
    return state


def _check_prefix(content: Any) -> None:
    """Refuse merges whose second part lacks `continuing_subword_prefix`.

    The library cuts off as many bytes without a check, and a cut within a character ends the
    process.

    Raises:
        ValueError: there is such a merge.
    """
    model = content["model"]
    prefix = model.get("continuing_subword_prefix")
    for merge in model.get("merges", ()) if prefix else ():
        second = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if not second.startswith(prefix):
            raise ValueError(f"its merge {merge!r} does not continue with {prefix!r}")


def _bytes_by_letter() -> dict[str, int]:
    """GPT-2's letters for bytes: printable bytes are themselves, the others follow 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _bytes_by_letter()
