"""A tokenizer.model becomes the same tokenizer as the published tokenizer.json."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from specops.models.errors import ModelError
from specops.models.layout import normalize, parts_of
from specops.models.sentencepiece import SentencePieceError, make_tokenizer
from tests.checkpoints import make_llama_checkpoint
from tests.text import published_tokenizers as published
from tests.text.test_tokenizer_kinds import TEXTS

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def kind_of(text: str) -> int:
    if text in ("<unk>", "<s>", "</s>"):
        return UNKNOWN if text == "<unk>" else CONTROL
    return BYTE if text.startswith("<0x") else NORMAL


def write_model(folder: Path, size: int, model_type: int = 2) -> Path:
    """Write Llama's pieces as SentencePiece does: merged ones by rank, then characters."""
    model = json.loads(published.llama(size).to_str())["model"]
    ranks = {"".join(pair): rank for rank, pair in reversed(list(enumerate(model["merges"])))}
    made = import_module("transformers.utils.sentencepiece_model_pb2_new").ModelProto()
    for text, index in sorted(model["vocab"].items(), key=lambda item: int(item[1])):
        kind = kind_of(text)
        score = -float(ranks.get(text, len(ranks) + index)) if kind == NORMAL else 0.0
        made.pieces.add(piece=text, score=score, type=kind)
    trainer = made.trainer_spec
    trainer.model_type, trainer.byte_fallback = model_type, True
    trainer.unk_id, trainer.bos_id, trainer.eos_id = 0, 1, 2
    made.normalizer_spec.add_dummy_prefix = True
    (folder / "tokenizer.model").write_bytes(made.SerializeToString())
    return folder


def test_texts_have_the_tokens_of_the_published_tokenizer(tmp_path: Path) -> None:
    made = make_tokenizer(write_model(tmp_path, 2000))
    expected = published.llama(2000)
    for text in TEXTS:
        assert made.encode(text).ids == expected.encode(text).ids, text
        assert made.decode(made.encode(text).ids) == expected.decode(expected.encode(text).ids)


def test_what_begins_a_text_is_said_beside_it(tmp_path: Path) -> None:
    write_model(tmp_path, 2000)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert make_tokenizer(tmp_path).encode("a").ids == published.llama(2000).encode("a").ids[1:]


def test_a_checkpoint_with_nothing_else_is_put_in_order(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", vocab=2000)
    (source / "tokenizer.json").unlink()
    write_model(source, 2000)
    assert not parts_of(source).in_order
    normalize(source, tmp_path / "arranged")
    made = FastTokenizer.from_file(str(tmp_path / "arranged" / "tokenizer.json"))
    assert made.encode("The fox").ids == published.llama(2000).encode("The fox").ids
    shutil.rmtree(tmp_path / "arranged")
    (source / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"tokenizer\.model is damaged.*put one beside"):
        normalize(source, tmp_path / "arranged")


@pytest.mark.parametrize("size", [0, 1, 100, 5000])
def test_a_damaged_file_is_said(size: int, tmp_path: Path) -> None:
    file = write_model(tmp_path, 2000) / "tokenizer.model"
    file.write_bytes(file.read_bytes()[:size] + b"\xff" * 12)
    with pytest.raises(SentencePieceError, match="is damaged"):
        make_tokenizer(tmp_path)


def test_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SentencePieceError, match="not a byte-pair encoding"):
        make_tokenizer(write_model(tmp_path, 2000, model_type=1))
