"""Files that somebody damaged, or made to do damage: each is converted whole or refused in words.

`GGUF_FUZZ_CASES` is the number of files for each way to damage one; what case n is follows from n.
"""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as Kind
from onnx import TensorProto, numpy_helper
from tokenizers import Tokenizer

from specops.models.convert import ExportError, export_checkpoint
from tests.checkpoints import make_llama_checkpoint
from tests.models.convert.gguf.files import write_gguf

CASES = int(os.environ.get("GGUF_FUZZ_CASES", "30"))
HANGS = 60  # seconds for one small file
MOST_GROWTH = 200 << 20  # bytes of memory, whatever the files claim
KINDS = {"q_proj": Kind.Q4_1, "k_proj": Kind.Q4_K, "v_proj": Kind.Q6_K, "o_proj": Kind.F16}
KINDS |= {"gate_proj": Kind.Q8_0, "up_proj": Kind.IQ4_NL, "embed": Kind.F32}
NUMBERS = (0, 1, 2, 0x7F, 0xFFFF, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
FLOATS = [np.array(value, "<f2").tobytes() for value in (np.nan, np.inf, -np.inf, 0, 65504)]
FLOATS += [np.array(value, "<f4").tobytes() for value in (np.nan, np.inf, 3e38, 1e-45)]
Damage = Callable[[bytearray, random.Random, int], None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file, small and of many types."""
    folder = tmp_path_factory.mktemp("gguf")
    sizes = {"hidden": 256, "layers": 1, "heads": 4, "kv_heads": 2, "ffn": 256, "context": 64}
    source = make_llama_checkpoint(folder / "source", **sizes)

    def kind_of(name: str) -> Kind:
        return next((kind for part, kind in KINDS.items() if part in name), Kind.Q4_0)

    return write_gguf(source, folder / "m.gguf", kind_of).read_bytes()


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A file that is never done with fails the test instead of stopping all of them."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"a file took more than {HANGS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def cut(data: bytearray, chance: random.Random, start: int) -> None:
    """The end is missing, mostly that of the weights."""
    del data[chance.randrange(chance.choice((0, start)), len(data) - 64) :]


def flip(data: bytearray, chance: random.Random, start: int) -> None:
    """A few bits of what the file says of itself."""
    for _ in range(chance.choice((1, 1, 2, 8))):
        data[chance.randrange(start)] ^= 1 << chance.randrange(8)


def enlarge(data: bytearray, chance: random.Random, start: int) -> None:
    """A number that may be a size, a count, an offset or a type becomes a hostile one."""
    size = chance.choice((4, 8))
    place = chance.choice((chance.randrange(4, 1200), chance.randrange(start - 1500, start)))
    data[place : place + size] = (chance.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")


def poison(data: bytearray, chance: random.Random, start: int) -> None:
    """Scales and weights that are no numbers, or much too large."""
    for _ in range(chance.choice((1, 3, 30))):
        place = chance.randrange(start, len(data) - 4) & ~1
        value = chance.choice(FLOATS)
        data[place : place + len(value)] = value


def splice(data: bytearray, chance: random.Random, start: int) -> None:
    """A piece is copied elsewhere, in place of what was there or between."""
    place, size = chance.randrange(start), chance.choice((4, 8, 40, 400))
    target = chance.randrange(start)
    data[target : target + chance.choice((0, size))] = data[place : place + size]


def rename(data: bytearray, chance: random.Random, start: int) -> None:
    """A key, a tensor or the architecture gets another's name, of the same length or not."""
    names = (b"llama", b"qwen2", b"gpt2", b"phi3", b"attn_q", b"attn_k", b"ffn_up", b"ffn_down")
    names += (b"blk.0", b"blk.1", b"token_embd", b"output_norm", b"weight", b"bias", b".rope.")
    found = [name for name in names if name in data[:start]]
    old, new = chance.choice(found), chance.choice(names)
    new = new.ljust(len(old), b"_")[: len(old)] if chance.random() < 0.7 else new
    data[:start] = data[:start].replace(old, new, chance.choice((1, 1, -1)))


@pytest.mark.parametrize("damage", [cut, flip, enlarge, poison, splice, rename])
def test_a_damaged_file_is_refused_in_words_or_converted_whole(
    damage: Damage, written: bytes, tmp_path: Path
) -> None:
    start = written.rindex(b"output_norm") + 100  # about where the weights begin
    file, made = tmp_path / "m.gguf", tmp_path / "onnx"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused: list[str] = []
    for case in range(CASES):
        data = bytearray(written)
        damage(data, random.Random(f"{damage.__name__} {case}"), start)
        file.write_bytes(data)
        signal.alarm(HANGS)
        try:
            export_checkpoint(file, made, quantization=None)
        except ExportError as error:
            refused.append(str(error))
        else:
            assert all(map(is_finite, onnx.load(made / "model.onnx").graph.initializer)), case
            Tokenizer.from_file(str(made / "tokenizer.json"))
            for path in made.iterdir():
                path.unlink()
            made.rmdir()
        assert [path.name for path in tmp_path.iterdir()] == [file.name], case
    assert refused
    assert all(str(file) in said or said.startswith("tensor ") for said in refused)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth * 1024 < MOST_GROWTH


def is_finite(tensor: TensorProto) -> bool:
    values = numpy_helper.to_array(tensor)
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
