"""Damaged and hostile GGUF files: each is converted completely or refused."""

import random
import shutil
from pathlib import Path

import numpy as np
import onnx
from gguf import GGMLQuantizationType as Kind
from onnx import TensorProto, numpy_helper
from tokenizers import Tokenizer

from specops.models.convert import ExportError, export_checkpoint
from specops.models.graph.prepack import prepack
from tests.checkpoints import make_llama_checkpoint
from tests.fuzz import damage
from tests.models.convert.gguf.files import write_gguf

FILE = "m.gguf"
KINDS = {"q_proj": Kind.Q4_1, "k_proj": Kind.Q4_K, "v_proj": Kind.Q6_K, "o_proj": Kind.F16}
KINDS |= {"gate_proj": Kind.Q3_K, "up_proj": Kind.IQ4_NL, "embed": Kind.Q2_K}
NUMBERS = (0, 1, 2, 0x7F, 0xFFFF, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
FLOATS = [np.array(value, "<f2").tobytes() for value in (np.nan, np.inf, -np.inf, 0, 65504)]
FLOATS += [np.array(value, "<f4").tobytes() for value in (np.nan, np.inf, 3e38, 1e-45)]


def make(folder: Path) -> None:
    """Write a small file with many types of tensors."""
    sizes = {"hidden": 256, "layers": 1, "heads": 4, "kv_heads": 2, "ffn": 256, "context": 64}
    source = make_llama_checkpoint(folder.parent / "gguf-source", **sizes)

    def kind_of(name: str) -> Kind:
        return next((kind for part, kind in KINDS.items() if part in name), Kind.Q4_0)

    write_gguf(source, folder / FILE, kind_of)


def read(folder: Path) -> None:
    """Convert it.

    Raises:
        ExportError: the file is refused.
        AssertionError: the refusal does not say where, or leaves files behind, or the converted
            model is not complete.
    """
    made = folder.parent / "made"
    try:
        export_checkpoint(folder / FILE, made, quantization=None)
    except ExportError as error:
        said = str(error)
        assert str(folder / FILE) in said or said.startswith("tensor "), said
        assert [path.name for path in folder.iterdir()] == [FILE]
        assert not list(folder.parent.glob(f"*{made.name}*"))
        raise
    try:
        assert all(map(_is_finite, onnx.load(made / "model.onnx").graph.initializer))
        prepack(made / "model.onnx", made / "prepacked")
        Tokenizer.from_file(str(made / "tokenizer.json"))
    finally:
        shutil.rmtree(made)


def _is_finite(tensor: TensorProto) -> bool:
    values = numpy_helper.to_array(tensor)
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def damaged(content: bytes, chance: random.Random, _is_json: bool) -> bytes:
    """A copy with a damage, half of the time one that is typical of a GGUF."""
    if chance.random() < 0.5:
        return damage.damaged(content, chance, is_json=False)
    data = bytearray(content)
    start = content.rindex(b"output_norm") + 100  # about where the weights begin
    chance.choice((_enlarge, _poison, _rename))(data, chance, start)
    return bytes(data)


def _enlarge(data: bytearray, chance: random.Random, start: int) -> None:
    """Overwrite what may be a size, a count, an offset or a type."""
    size = chance.choice((4, 8))
    place = chance.choice((chance.randrange(4, 1200), chance.randrange(start - 1500, start)))
    data[place : place + size] = (chance.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")


def _poison(data: bytearray, chance: random.Random, start: int) -> None:
    """Write infinite, huge or invalid numbers into scales and weights."""
    for _ in range(chance.choice((1, 3, 30))):
        place = chance.randrange(start, len(data) - 4) & ~1
        value = chance.choice(FLOATS)
        data[place : place + len(value)] = value


def _rename(data: bytearray, chance: random.Random, start: int) -> None:
    """Give a key, a tensor or the architecture another name, mostly of the same length."""
    names = (b"llama", b"qwen2", b"gpt2", b"phi3", b"attn_q", b"attn_k", b"ffn_up", b"ffn_down")
    names += (b"blk.0", b"blk.1", b"token_embd", b"output_norm", b"weight", b"bias", b".rope.")
    found = [name for name in names if name in data[:start]]
    old, new = chance.choice(found), chance.choice(names)
    new = new.ljust(len(old), b"_")[: len(old)] if chance.random() < 0.7 else new
    data[:start] = data[:start].replace(old, new, chance.choice((1, 1, -1)))
