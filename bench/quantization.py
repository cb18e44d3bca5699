"""What each way to store weights costs in quality, in bytes and in time.

Quality is bits per byte of text that the demo target was never trained on, as its model card
measures it: the same windows, the exported graph, ONNX Runtime's own kernels. Every choice sees
the same text, so the difference to fp32 can be given with the standard error of that difference
over the documents: what is smaller than it is no difference.
What each costs in time is measured by `layer_stack`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from bench.report import Table
from specops.cpus import available_threads
from specops.export import Quantization, export_checkpoint
from training.corpus import DEMO_DIR, read_held_out
from training.evaluate import STRIDE, WINDOW, document_bits, end_mark
from training.onnx_model import OnnxModel

_BASE = "int4-128"  # the choice whose head and embedding are varied
_METHODS = ("rtn", "search", "zp")

Progress = Callable[[str], None]


def _choices() -> dict[str, Quantization]:
    """By title: everything that is compared."""
    texts = ["fp32", "int8-32", "int8-128", "int8-256"]
    texts += [f"int4-{block}-{method}" for block in (32, 64, 128, 256) for method in _METHODS]
    choices = {Quantization.parse(text).name: Quantization.parse(text) for text in texts}
    base = choices[_BASE]
    choices[f"{_BASE}, head int4"] = replace(base, head_bits=4)
    choices[f"{_BASE}, embedding int4"] = replace(base, embedding_bits=4)
    choices[f"{_BASE}, head and embedding int4"] = replace(base, head_bits=4, embedding_bits=4)
    return choices


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        choices: their titles; None for all.
        documents: held-out documents, from the first; None for all.
        tokens: of each document, from its beginning.
    """

    choices: tuple[str, ...] | None = None
    documents: int | None = None
    tokens: int = WINDOW + STRIDE


class Quality(NamedTuple):
    """Bits per byte, its difference to fp32 and that difference's standard error; file sizes.

    `layer_bits` is bits per weight of the linear layers, scales and zero points included;
    `bytes_per_weight` is of the whole file, head and embedding included.
    """

    bits_per_byte: float
    difference: float
    standard_error: float
    layer_bits: float
    bytes_per_weight: float


def measure(plan: Plan, progress: Progress, folder: Path = DEMO_DIR) -> dict[str, Quality]:
    """Bits per byte of each choice, fp32 first."""
    choices = {
        title: choice
        for title, choice in _choices().items()
        if plan.choices is None or title in ("fp32", *plan.choices)
    }
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    mark = end_mark(tokenizer)
    documents = []
    for document in read_held_out(folder)[: plan.documents]:
        ids = tokenizer.encode(document.text).ids[: plan.tokens]
        documents.append(([mark, *ids], len(tokenizer.decode(ids).encode())))
    found: dict[str, Quality] = {}
    exact: list[float] = []
    total = sum(size for _, size in documents)
    for title, choice in choices.items():
        with TemporaryDirectory() as scratch:
            model = export_checkpoint(
                folder / "target", Path(scratch) / "model", quantization=choice
            )
            data = model.graph_file.with_name(f"{model.graph_file.name}.data").stat().st_size
            run = OnnxModel(model, threads=available_threads(), capacity=WINDOW)
            bits = [document_bits(run.afresh, tokens) for tokens, _ in documents]
        exact = exact or bits
        found[title] = Quality(
            sum(bits) / total,
            (sum(bits) - sum(exact)) / total,
            _standard_error([(b - e) for b, e in zip(bits, exact, strict=True)], documents),
            _layer_bits(choice),
            data / model.num_parameters,
        )
        progress(f"{title}: {found[title].bits_per_byte:.5f} bits per byte")
    return found


def _standard_error(
    differences: Sequence[float], documents: Sequence[tuple[list[int], int]]
) -> float:
    """Of a ratio of sums over documents (bits to bytes), by the delta method."""
    sizes = [size for _, size in documents]
    rate = sum(differences) / sum(sizes)
    rest = [bits - rate * size for bits, size in zip(differences, sizes, strict=True)]
    spread = statistics.stdev(rest) if len(rest) > 1 else 0.0
    return float(spread * len(rest) ** 0.5 / sum(sizes))


def _layer_bits(choice: Quantization) -> float:
    if choice.bits == 32:
        return 32.0
    zero_point = choice.bits if choice.bits == 4 and choice.method == "zp" else 0
    return choice.bits + (32 + zero_point) / choice.block


def table(found: dict[str, Quality]) -> Table:
    """A row per choice."""
    rows = [
        [
            title,
            f"{item.layer_bits:.3f}",
            f"{item.bytes_per_weight:.3f}",
            f"{item.bits_per_byte:.4f}",
            f"{1000 * item.difference:+.2f} ± {1000 * item.standard_error:.2f}",
        ]
        for title, item in found.items()
    ]
    return Table(
        "Quality of the demo target on held-out text",
        ["weights", "bits/weight, layers", "bytes/weight, file", "bits per byte", "to fp32, ‰"],
        rows,
        notes=(
            "to fp32: thousandths of a bit per byte more than fp32 needs, ± the standard error "
            "of that difference over the documents",
            "head and embedding in int8 unless said otherwise; rtn: rounded to nearest; no "
            "suffix: least-squares search; zp: search with zero points",
        ),
    )


def result(found: dict[str, Quality], plan: Plan) -> dict[str, Any]:
    """What was measured, fit for JSON."""
    return {
        "plan": asdict(plan),
        "choices": {title: item._asdict() for title, item in found.items()},
    }
