"""The demo pair's graphs give the same bits however a text is cut, in every kind of KV cache."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from specops.config import Settings
from specops.models.convert import Quantization, export_checkpoint
from tests.passes import Passes, prepared, random_chunks

DEMO = Settings().models_dir / "demo"
TEXT = Path(np.__file__).with_name("version.py")  # a text that was not in the training data


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8") * 4).ids
    return ids[:300]


@pytest.fixture(scope="module", params=["int8-128", "int4-128-rtn", "int4-32-rtn"])
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared graph that ships with the service, or an export in other weights."""
    cache = tmp_path_factory.mktemp("demo")
    shipped = DEMO / "target" / "onnx" / request.param / "model.onnx"
    if shipped.exists():
        return prepared(shipped, cache)
    quantization = Quantization.parse(request.param)
    model = export_checkpoint(DEMO / "target", cache / "onnx", quantization=quantization)
    return prepared(model.graph_file, cache)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_a_text_leaves_the_same_bits_however_it_is_cut(
    graph: Path, tokens: list[int], dtype: str
) -> None:
    passes = Passes(graph, slots=3, context=512, dtype=dtype)
    whole = passes.step(0, tokens)
    assert np.isfinite(whole).all()
    for seed in range(3):
        passes.rewind(1, 0)
        cut = [passes.step(1, piece) for piece in random_chunks(tokens, seed)]
        np.testing.assert_array_equal(np.concatenate(cut), whole)
    alone = [passes.step(2, [token]) for token in tokens]
    np.testing.assert_array_equal(np.concatenate(alone), whole)


def test_the_number_of_threads_changes_no_bit(graph: Path, tokens: list[int]) -> None:
    """This process uses one thread, the child process three."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from specops.runtime.session import share_threads\n"
        "from tests.passes import Passes\n"
        "share_threads(3)\n"
        "passes = Passes(Path(sys.argv[1]), context=512)\n"
        f"parts = [passes.step(0, {tokens[:200]}), passes.step(0, {tokens[200:203]})]\n"
        "sys.stdout.buffer.write(b''.join(part.tobytes() for part in parts))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, graph], capture_output=True, check=True)
    whole = Passes(graph, context=512).step(0, tokens[:203])
    assert done.stdout == whole.tobytes()


def test_rolling_back_leaves_no_trace(graph: Path, tokens: list[int]) -> None:
    passes = Passes(graph, context=512)
    whole = passes.step(0, tokens)
    passes.step(1, tokens[:130])
    passes.step(1, tokens[:9])  # rejected, over the end of a block
    passes.rewind(1, 126)
    np.testing.assert_array_equal(passes.step(1, tokens[126:]), whole[126:])


def test_several_texts_in_a_pass_leave_each_its_own_bits(graph: Path, tokens: list[int]) -> None:
    passes = Passes(graph, context=512)
    alone = [passes.step(slot, tokens[slot * 7 :]) for slot in range(3)]
    for slot in range(3):
        passes.rewind(slot, 0)
    pieces = [iter(random_chunks(tokens[slot * 7 :], slot, longest=48)) for slot in range(3)]
    found: list[list[np.ndarray]] = [[], [], []]
    while True:
        spans = {slot: piece for slot in range(3) if (piece := next(pieces[slot], None))}
        if not spans:
            break
        for slot, logits in passes.together(spans).items():
            found[slot].append(logits)
    for slot in range(3):
        np.testing.assert_array_equal(np.concatenate(found[slot]), alone[slot])
