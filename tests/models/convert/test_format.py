"""A conversion that gets another content has another format version.

Conversions are kept by `FORMAT_VERSION`, which goes up by hand. Digests of small conversions stand
in `formats.json`, beside the version that wrote them: where one differs, the version has to go up.
Then `python -m tests.models.convert.test_format` writes the file anew.

Digests are of what has the same bits on every processor. The frequencies of rotations, whose powers
may be rounded differently, are compared up to that, and so are weights of a calibrated conversion.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from gguf import GGMLQuantizationType as Kind
from onnx import numpy_helper

from specops.models.contract import FORMAT_VERSION
from specops.models.convert import Quantization, export_checkpoint
from specops.models.sentencepiece import make_tokenizer
from tests.checkpoints import make_checkpoint, make_llama_checkpoint
from tests.models.convert.gguf.files import DRAWN, SIZES, WRITTEN, write_gguf
from tests.models.convert.test_families import CASES, VOCAB
from tests.models.test_sentencepiece import write_model

RECORDED = Path(__file__).with_name("formats.json")
QUANTS = ("fp32", "int8-32", "int8-128", "int4-32-rtn", "int4-128-rtn")
CALIBRATED = "int4-32"
GENERATED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

Described = dict[str, Any]


def of_family(name: str, folder: Path) -> Described:
    case = CASES[name]
    make_checkpoint(folder / "source", case.kind, vocab=VOCAB, **case.options)
    return exported(folder / "source", folder, "int8-32")


def of_quantization(name: str, folder: Path) -> Described:
    make_llama_checkpoint(folder / "source", hidden=128, dtype="bfloat16", ffn=256)
    return exported(folder / "source", folder, name)


def of_gguf(kind: Kind, folder: Path) -> Described:
    source = make_llama_checkpoint(folder / "source", **SIZES)
    file = write_gguf(source, folder / "source.gguf", lambda _: kind)
    return exported(file, folder, None)


def of_sentencepiece(folder: Path) -> Described:
    made = json.loads(make_tokenizer(write_model(folder, 2000)).to_str())
    return {"digest": sha(made), "tables": {}}


Cases = dict[str, Callable[[Path], Described]]
ALL: Cases = {
    **{f"family: {name}": partial(of_family, name) for name in CASES},
    **{f"weights: {name}": partial(of_quantization, name) for name in (*QUANTS, CALIBRATED)},
    **{f"gguf: {kind.name}": partial(of_gguf, kind) for kind in (*WRITTEN, *DRAWN)},
    "tokenizer.model": of_sentencepiece,
}


def exported(source: Path, folder: Path, name: str | None) -> Described:
    """Export and describe a checkpoint; calibrated weights by their number, others by content."""
    quantization = Quantization.parse(name) if name else None
    model = export_checkpoint(
        source, folder / "out", quantization=quantization, source_digest="sha256:0"
    )
    manifest = model.manifest()
    del manifest["format_version"]
    graph = onnx.load(model.graph_file)
    tensors, tables = [], {}
    for item in graph.graph.initializer:
        values = numpy_helper.to_array(item)
        content = None if name == CALIBRATED else hashlib.sha256(values.tobytes()).hexdigest()
        if _is_table(item.name):
            content, tables[item.name] = None, _sums(values)
        tensors.append((item.name, item.data_type, list(item.dims), content))
    texts = {
        file: json.loads((model.path / file).read_text())
        for file in GENERATED
        if source.is_file() and (model.path / file).is_file()  # a folder's own are copied
    }
    nodes = list(_nodes(graph.graph))
    inputs = [(item.name, item.type.SerializeToString().hex()) for item in graph.graph.input]
    return {"digest": sha([manifest, nodes, inputs, tensors, texts]), "tables": tables}


def _nodes(graph: onnx.GraphProto) -> Iterator[list[Any]]:
    for node in graph.node:
        attributes = sorted(item.SerializeToString(deterministic=True) for item in node.attribute)
        yield [
            *(node.domain, node.op_type, list(node.input), list(node.output)),
            [item.hex() for item in attributes],
        ]


def _is_table(name: str) -> bool:
    return name.endswith("frequencies")


def _sums(values: np.ndarray[Any, Any]) -> list[float]:
    """A few sums that any other table would change."""
    wide = values.astype(np.float64)
    weights = np.linspace(1.0, 2.0, wide.size).reshape(wide.shape)
    return [float(wide.sum()), float((wide * weights).sum()), float((wide * wide).sum())]


def sha(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def same(found: Described, known: Described) -> bool:
    if found["digest"] != known["digest"] or found["tables"].keys() != known["tables"].keys():
        return False
    return all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-4)
        for name, sums in found["tables"].items()
        for a, b in zip(sums, known["tables"][name], strict=True)
    )


def test_the_recorded_digests_are_of_this_format() -> None:
    known = recorded()
    assert known["format_version"] == FORMAT_VERSION, (
        "FORMAT_VERSION has gone up: record what it writes with "
        "`python -m tests.models.convert.test_format`"
    )
    assert known["conversions"].keys() == ALL.keys(), (
        "cases were added or removed: run `python -m tests.models.convert.test_format`"
    )


@pytest.mark.parametrize("name", ALL)
def test_another_content_has_another_format_version(name: str, tmp_path: Path) -> None:
    known = recorded()
    found, before = ALL[name](tmp_path), known["conversions"].get(name)
    assert before is not None, "a new case: run `python -m tests.models.convert.test_format`"
    assert same(found, before) or known["format_version"] != FORMAT_VERSION, (
        f"a conversion ({name}) has another content than before: add 1 to FORMAT_VERSION in "
        "specops/models/contract.py, then run `python -m tests.models.convert.test_format`"
    )


def main() -> int:
    """Record the digests, if the version has gone up wherever one differs."""
    found = {}
    for name, make in ALL.items():
        with TemporaryDirectory() as folder:
            found[name] = make(Path(folder))
    if RECORDED.exists() and (known := recorded())["format_version"] == FORMAT_VERSION:
        before = known["conversions"]
        changed = [name for name in found if name in before and not same(found[name], before[name])]
        if changed:
            print("add 1 to FORMAT_VERSION first, another content have:", *changed, sep="\n  ")
            return 1
    content = {"format_version": FORMAT_VERSION, "conversions": found}
    RECORDED.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
