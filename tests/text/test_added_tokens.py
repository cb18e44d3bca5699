"""Tokens that stand only beside tokenizer.json are tokens, as in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from specops.text.added_tokens import add_missing
from specops.text.tokenizer import Tokenizer, TokenizerError
from tests.text import published_tokenizers as published

SIZE = 600
TEXT = "<|im_start|>user\nHi <tool_call> there<|im_end|>\n<think> x</think><|endoftext|>"


def folder_with(path: Path, files: dict[str, Any], *, plain: tuple[str, ...] = ()) -> Path:
    """GPT-2's tokenizer, and files of JSON beside it. `plain` are entries like others."""
    made = json.loads(published.gpt2(SIZE).to_str())
    made["added_tokens"] = []
    vocab = made["model"]["vocab"]
    last = sorted(vocab, key=vocab.__getitem__)[-len(plain) :] if plain else []
    for old, new in zip(last, plain, strict=True):
        vocab[new] = vocab.pop(old)
    (path / "tokenizer.json").write_text(json.dumps(made))
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


def described(*texts: str, start: int, special: bool = True, **flags: Any) -> dict[str, Any]:
    entries = (
        {"content": text, "special": special, "normalized": False, **flags} for text in texts
    )
    return {str(start + index): entry for index, entry in enumerate(entries)}


CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
CASES: dict[str, dict[str, Any]] = {
    "added_tokens_decoder": {
        "tokenizer_config.json": {
            **CLASS,
            "added_tokens_decoder": {
                **described("<|im_start|>", "<|im_end|>", start=599),
                **described("<tool_call>", start=601, special=False),
                **described("<think>", start=602, special=False, lstrip=True),
            },
            "eos_token": "<|im_end|>",
        }
    },
    "added_tokens.json": {
        "tokenizer_config.json": {**CLASS, "additional_special_tokens": ["<|im_start|>"]},
        "added_tokens.json": {"<|im_end|>": 600, "<|im_start|>": 599, "<tool_call>": 601},
        "special_tokens_map.json": {"eos_token": "<|im_end|>"},
    },
    "a role alone": {
        "tokenizer_config.json": {
            **CLASS,
            "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
        }
    },
    "a list alone": {
        "tokenizer_config.json": {**CLASS, "additional_special_tokens": ["<|im_end|>", "<think>"]}
    },
}
PLAIN = {"a role alone": ("<|im_end|>",), "a list alone": ("<|im_end|>", "<think>")}


@pytest.mark.parametrize("case", CASES)
def test_they_are_transformers_tokens(case: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, CASES[case], plain=PLAIN.get(case, ()))
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer.load(folder)
    tokens = tokenizer.encode(TEXT)
    assert list(tokens) == reference(TEXT)["input_ids"]
    assert tokenizer.decode(tokens) == reference.decode(tokens, skip_special_tokens=True)
    assert tokenizer.token("<|im_end|>") == reference.convert_tokens_to_ids("<|im_end|>")
    end = tokenizer.token("<|im_end|>")
    assert end is not None
    assert tokenizer.shown_bytes(end) == b""


def test_a_token_gets_no_other_id_than_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"added_tokens_decoder": described("<|im_end|>", start=700), **CLASS}
    tokenizer = Tokenizer.load(folder_with(tmp_path, {"tokenizer_config.json": config}))
    assert tokenizer.token("<|im_end|>") is None
    assert "ignoring token 700, '<|im_end|>'" in caplog.text


def test_what_tokenizer_json_says_is_kept(tmp_path: Path) -> None:
    tokenizer = published.gpt2(SIZE)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    before = tokenizer.to_str()
    content = AddedToken("<|endoftext|>", special=True)
    decoder = {"599": {"content": content.content, "special": True, "normalized": True}}
    config = {"added_tokens_decoder": decoder, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    add_missing(tokenizer, tmp_path)
    assert tokenizer.to_str() == before


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {})
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(folder)
