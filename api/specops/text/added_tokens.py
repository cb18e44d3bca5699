"""Adds the tokens that tokenizer.json lacks to a tokenizer, and finds special tokens' texts.

Not all published models repeat these tokens in tokenizer.json: `tokenizer_config.json` has them in
`added_tokens_decoder`, older folders in `added_tokens.json`. A missing token would be split into
pieces in a prompt and shown in an answer. The rules are those of `transformers`, except that a
token never gets an id other than the files'.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from specops.text.files import ADDED_TOKENS, SPECIAL_TOKENS, TOKENIZER_CONFIG

log = logging.getLogger(__name__)

_DESCRIBED = "added_tokens_decoder"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def special_texts(folder: Path) -> dict[str, str]:
    """Return the texts of a folder's special tokens by role, such as `eos_token`.

    Raises:
        ValueError: a file is not valid JSON.
        OSError: a file cannot be read.
    """
    by_role: dict[str, str] = {}
    for content in _settings(folder):
        by_role |= texts_by_role(content)
    return by_role


def texts_by_role(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a file's special tokens by role."""
    return {name: text for name in _NAMES if (text := _text(content.get(name)))}


def add_missing(tokenizer: Tokenizer, folder: Path) -> None:
    """Add the tokens from the folder's other files to its tokenizer.

    Raises:
        ValueError: a file is not valid JSON.
        OSError: a file cannot be read.
    """
    special = {*special_texts(folder).values(), *_listed(folder)}
    known = tokenizer.get_added_tokens_decoder()
    for index, token in sorted(_described(folder, special).items()):
        if index in known and repr(known[index]) == repr(token):
            continue
        present = tokenizer.token_to_id(token.content)
        if index != (tokenizer.get_vocab_size() if present is None else present):
            log.warning(
                "%s: ignoring token %d, %r: its id does not fit a vocabulary of %d tokens",
                *(folder, index, token.content, tokenizer.get_vocab_size()),
            )
            continue
        tokenizer.add_tokens([token])
    known_texts = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for text in sorted(special - known_texts):
        if tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, normalized=False)])


def _described(folder: Path, special: set[str]) -> dict[int, AddedToken]:
    """Return the files' tokens by id."""
    tokens: dict[int, AddedToken] = {}
    described = _read(folder / TOKENIZER_CONFIG).get(_DESCRIBED)
    if isinstance(described, dict) and described:
        for index, entry in described.items():
            if str(index).isdecimal() and (text := _text(entry)):
                flags = {name: bool(entry[name]) for name in _FLAGS if name in entry}
                flags["special"] = flags.get("special", False) or text in special
                tokens[int(index)] = AddedToken(text, **flags)
        return tokens
    for text, index in _read(folder / ADDED_TOKENS).items():
        if type(index) is int and text:
            is_special = text in special
            tokens[index] = AddedToken(text, normalized=not is_special, special=is_special)
    return tokens


def _listed(folder: Path) -> Iterator[str]:
    """Yield the texts of special tokens without a role."""
    for content in _settings(folder):
        for name in _LISTS:
            entries = content.get(name)
            if isinstance(entries, dict):  # by name
                entries = list(entries.values())
            for entry in entries if isinstance(entries, list) else ():
                if text := _text(entry):
                    yield text


def _settings(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of the files that name special tokens; later ones have precedence."""
    config = _read(folder / TOKENIZER_CONFIG)
    return [config] if config.get(_DESCRIBED) else [config, _read(folder / SPECIAL_TOKENS)]


def _text(entry: Any) -> str:
    """Return the text of a token, which is written as a text or an object."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else ""


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
