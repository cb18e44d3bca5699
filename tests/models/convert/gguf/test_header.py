"""Every file is read or refused with a clear error, without a crash and in little memory."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from specops.models.convert import ExportError, export_checkpoint
from specops.models.convert.gguf.checkpoint import GgufCheckpoint
from specops.models.convert.gguf.header import read_header
from specops.models.errors import ModelError
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.gguf.files import SIZES, write_gguf

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


def text(value: str) -> bytes:
    return U64.pack(len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + U32.pack(kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(U64.pack(size) for size in shape)
    return text(name) + U32.pack(len(shape)) + sizes + U32.pack(kind) + U64.pack(offset)


def file_of(
    *parts: bytes, tensors: int = 0, entries: int = 0, version: int = 3, magic: bytes = b"GGUF"
) -> bytes:
    head = magic + U32.pack(version) + U64.pack(tensors) + U64.pack(entries)
    made = head + b"".join(parts)
    return made + bytes(-len(made) % 32 + 4096)


HOSTILE = {
    "not GGUF": (file_of(magic=b"GGML"), "is not a GGUF: it begins with b'GGML'"),
    "version 1": (file_of(version=1), "has version 1; versions 2 and 3"),
    "big-endian": (file_of(version=3 << 24), "it was written big-endian"),
    "too short": (b"GGUF\3\0\0\0", "shorter than a GGUF header"),
    "empty": (b"", "shorter than a GGUF header"),
    "many tensors": (file_of(tensors=1 << 62), "claims 4611686018427387904 tensors"),
    "many entries": (file_of(entries=60_000), "claims 60000 entries of metadata"),
    "a long key": (file_of(U64.pack(1 << 63), entries=1), "'a key' of 9223372036854775808 bytes"),
    "a key beyond the end": (file_of(U64.pack(60_000), entries=1), "'a key' reaches beyond"),
    "a key without a name": (file_of(entry("", 0, b"\1"), entries=1), "a key without a name"),
    "a key twice": (file_of(entry("a", 0, b"\1") * 2, entries=2), "has the key 'a' twice"),
    "no text": (file_of(U64.pack(2), b"\xff\xfe", entries=1), "not UTF-8"),
    "an unknown type": (file_of(entry("a", 77, b""), entries=1), "of an unknown type, number 77"),
    "a long text": (file_of(entry("a", 8, U64.pack(1 << 40)), entries=1), "of 1099511627776 bytes"),
    "a long array": (
        file_of(entry("a", 9, U32.pack(6) + U64.pack(1 << 61)), entries=1),
        "'a' reaches beyond its end",
    ),
    "many texts": (
        file_of(entry("a", 9, U32.pack(8) + U64.pack(1 << 40)), entries=1),
        "an array of 1099511627776 of type 8",
    ),
    "arrays in arrays": (
        file_of(entry("a", 9, (U32.pack(9) + U64.pack(1)) * 9), entries=1),
        "with an array of 1 of type 9",
    ),
    "an odd alignment": (
        file_of(entry("general.alignment", 4, U32.pack(24)), entries=1),
        "an alignment of 24",
    ),
    "no alignment": (
        file_of(entry("general.alignment", 8, text("x")), entries=1),
        "an alignment of 'x'",
    ),
    "no dimensions": (file_of(tensor("w", (), 0, 0), tensors=1), "the tensor 'w' of 0 dimensions"),
    "five dimensions": (file_of(tensor("w", (1,) * 5, 0, 0), tensors=1), "of 5 dimensions"),
    "a side of 0": (file_of(tensor("w", (0, 4), 0, 0), tensors=1), r"of shape \[4, 0\]"),
    "sizes that overflow": (
        file_of(tensor("w", (1 << 32, 1 << 32), 0, 0), tensors=1),
        "has the tensor 'w' of shape",
    ),
    "no whole blocks": (file_of(tensor("w", (40, 2), 2, 0), tensors=1), "not whole blocks of Q4_0"),
    "a type of the future": (
        file_of(tensor("w", (32,), 99, 0), tensors=1),
        "of type number 99, which is newer .*: download the model as Q4_K_M",
    ),
    "a type of the past": (
        file_of(tensor("w", (32,), 31, 0), tensors=1),
        "of type Q4_0_4_4: download the model as Q4_K_M",
    ),
    "beyond the end": (file_of(tensor("w", (32, 999), 0, 0), tensors=1), "damaged or cut short"),
    "an offset beyond": (file_of(tensor("w", (32,), 0, 1 << 62), tensors=1), "cut short"),
    "an odd offset": (file_of(tensor("w", (32,), 0, 8), tensors=1), "damaged or cut short"),
    "a tensor twice": (
        file_of(tensor("w", (32,), 0, 0), tensor("w", (32,), 0, 128), tensors=2),
        "has the tensor 'w' twice",
    ),
    "one place": (
        file_of(tensor("v", (32,), 0, 0), tensor("w", (32,), 0, 96), tensors=2),
        "'v' and 'w' at overlapping places",
    ),
    "a long name": (file_of(tensor("w" * 999, (32,), 0, 0), tensors=1), 'name" of 999 bytes'),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    file = tmp_path / "hostile.gguf"
    file.write_bytes(content)
    with pytest.raises(ExportError, match=f"hostile.gguf .*{message}"):
        read_header(file)


def test_text_that_is_not_utf_8_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "m.gguf"
    author = U64.pack(6) + b"Andr\xe9s"
    texts = U32.pack(8) + U64.pack(2) + (U64.pack(1) + b"\xff") * 2
    parts = (entry("general.author", 8, author), entry("general.tags", 9, texts))
    file.write_bytes(file_of(*parts, entries=2))
    assert read_header(file).metadata == {
        "general.author": "Andr\ufffds",
        "general.tags": ["\ufffd"] * 2,
    }
    assert [record.args[1] for record in caplog.records if record.args] == [
        "general.author",
        "general.tags",
    ]


@pytest.mark.parametrize(
    ("kind", "count", "size", "message"),
    [(8, 1 << 22, 0, "beyond its end"), (0, 1 << 30, 1 << 31, "beyond the first 67108864 bytes")],
)
def test_a_claim_takes_no_memory(
    kind: int, count: int, size: int, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(file_of(entry("a", 9, U32.pack(kind) + U64.pack(count)), entries=1))
    if size:
        os.truncate(file, size)  # with a hole
    tracemalloc.start()
    with pytest.raises(ExportError, match=message):
        read_header(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


# -- whole files that cannot be exported -------------------------------------------------------


def refusal(
    folder: Path, change: Callable[[GGUFWriter], None], old: str = "", new: str = ""
) -> str:
    """The error of an export after a change of the metadata or of a text in the file."""
    source = make_llama_checkpoint(folder / "source", **{**SIZES, "layers": 1})
    file = write_gguf(source, folder / "m.gguf", lambda name: Kind.Q4_0, change=change)
    file.write_bytes(file.read_bytes().replace(text(old), text(new), 1))
    with pytest.raises(ExportError) as caught:
        export_checkpoint(file, folder / "onnx", quantization=None)
    assert not (folder / "onnx").exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "add", "value", "message"),
    [
        ("llama.expert_count", "uint32", 8, "is 8: this is a mixture of experts"),
        ("llama.rope.scaling.type", "string", "su", "is su; only none, linear, yarn and"),
        ("llama.attention.key_length", "uint32", 1 << 30, "too large"),
        ("llama.attention.value_length", "uint32", 32, "must equal the key length, 64"),
        ("llama.logit_scale", "float32", 8.0, "is 8.0; this cannot be exported"),
        ("llama.rope.scaling.attn_factor", "float32", 2.0, "is 2.0; this cannot be exported"),
        ("llama.nextn_predict_layers", "uint32", 1, "is 1; this cannot be exported"),
        ("llama.embedding_length_out", "uint32", 9, "must be the same as"),
        ("llama.attention.key_length_swa", "uint32", 9, "must be the same as"),
    ],
)
def test_settings_that_cannot_be_drawn(
    key: str, add: str, value: object, message: str, tmp_path: Path
) -> None:
    said = refusal(tmp_path, lambda writer: getattr(writer, f"add_{add}")(key, value))
    assert f"m.gguf: key '{key}' " in said
    assert message in said


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    said = refusal(tmp_path, lambda writer: None, "llama", "mamba")
    assert "is mamba, which is not supported; supported are cohere2, " in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blk.0.attn_q.scale", "is not part of the architecture llama"),
        ("blk.7.attn_q.weight", "is not part of this architecture"),
    ],
)
def test_tensors_without_a_place_are_named(name: str, message: str, tmp_path: Path) -> None:
    said = refusal(tmp_path, lambda writer: writer.add_tensor(name, np.ones(64, np.float32)))
    assert f"{name} {message}" in said


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", **{**SIZES, "layers": 1})
    made = json.loads((source / "tokenizer.json").read_text())
    made["added_tokens"].append({"id": 320, "content": "<more>", "special": True})
    (source / "tokenizer.json").write_text(json.dumps(made))
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: Kind.Q4_0)
    with pytest.raises(ExportError, match="has 321 tokens for a table of 320"):
        GgufCheckpoint(file)


def test_a_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", **{**SIZES, "layers": 1})
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: Kind.Q4_1)
    damaged = bytearray(file.read_bytes())
    place = damaged.index(text("blk.0.ffn_down.weight")) + 8 + 21 + 4 + 16
    damaged[place : place + 4] = U32.pack(Kind.IQ2_S)
    file.write_bytes(damaged)
    with pytest.raises(ExportError, match="has type IQ2_S; those that can be read are"):
        GgufCheckpoint(file)


def test_a_vector_in_blocks_is_named(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", **{**SIZES, "layers": 1})
    file = write_gguf(source, tmp_path / "m.gguf", lambda name: Kind.Q4_1)
    damaged = bytearray(file.read_bytes())
    place = damaged.index(text("blk.0.ffn_norm.weight")) + 8 + 21 + 4 + 8
    damaged[place : place + 4] = U32.pack(Kind.Q8_0)
    file.write_bytes(damaged)
    with pytest.raises(ExportError, match=r"ffn_norm.weight has type Q8_0; vectors can only be"):
        GgufCheckpoint(file).vector("model.layers.0.post_attention_layernorm.weight")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    source = make_llama_checkpoint(tmp_path / "source", **{**SIZES, "layers": 1})
    first = write_gguf(source, tmp_path / "m.gguf", lambda name: Kind.Q4_0, split=5)
    first.with_name(first.name.replace("00001-of", "00002-of")).unlink()
    with pytest.raises(ModelError, match=r"00002-of-\d+\.gguf is missing"):
        GgufCheckpoint(first)
