"""The tokenizer's promise: decoding gives back the exact text, whatever it was."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from training.corpus import read_held_out
from training.tokenizer import END_OF_TEXT, VOCAB_SIZE, save_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([document.text for document in read_held_out()[:4]], vocab_size=600)


@given(text=st.text(max_size=200).filter(lambda text: END_OF_TEXT not in text))
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@given(
    text=st.lists(
        st.sampled_from(
            [" ", "    ", "\t", "\n", "\r\n", "\f", "x", "_a", "12345", "):", "é", "\u2028"]
        ),
        max_size=40,
    ).map("".join)
)
def test_white_space_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_byte_has_a_token_even_if_training_never_saw_it() -> None:
    tiny = train_tokenizer(["a"], vocab_size=300)
    assert tiny.get_vocab_size() == 257 <= VOCAB_SIZE


def test_transformers_reads_the_saved_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, context=1024)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f():\n    return 'naïve'  # 日本\n"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.bos_token, loaded.eos_token) == (END_OF_TEXT, END_OF_TEXT)
    assert loaded.model_max_length == 1024
