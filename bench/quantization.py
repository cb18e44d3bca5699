"""What each way to store weights costs in quality, in bytes and in time.

Quality is bits per byte of text that the demo target was never trained on, as its model card
measures it: the same windows, the exported graph, by ONNX Runtime's kernels and, where it says so,
by ours with an fp32 KV cache. Every choice sees
the same text, so the difference to fp32 can be given with the standard error of that difference
over the documents: what is smaller than it is no difference.
What each costs in time is measured by `layer_stack`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from bench.forward import Model, open_graph
from bench.models import BenchModel, configured
from bench.report import Table
from specops.cpus import available_threads
from specops.engine import NO_DRAFTER
from specops.export import Quantization, export_checkpoint
from training.corpus import DEMO_DIR, read_held_out
from training.evaluate import STRIDE, WINDOW, Forward, document_bits, end_mark
from training.onnx_model import OnnxModel

_BASE = "int4-128"  # the choice whose head and embedding are varied
_TILED = f"{_BASE}, our kernels"  # see `specops.kernels`
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
    choices[_TILED] = base
    return choices


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        choices: their titles, beside fp32 and int4-128; None for all.
        documents: held-out documents, from the first; None for all.
        tokens: of each document, from its beginning.
    """

    choices: tuple[str, ...] | None = None
    documents: int | None = None
    tokens: int = WINDOW + STRIDE


class Quality(NamedTuple):
    """Bits that every document needs, and what the weights take.

    `layer_bits` is bits per weight of the linear layers, scales and zero points included;
    `bytes_per_weight` is of the whole file, head and embedding included.
    """

    document_bits: list[float]
    layer_bits: float
    bytes_per_weight: float


class Measured(NamedTuple):
    """What was found for every choice, fp32 first, and the documents' sizes in bytes."""

    choices: dict[str, Quality]
    document_bytes: list[int]

    def bits_per_byte(self, title: str) -> float:
        """Of all documents together."""
        return sum(self.choices[title].document_bits) / sum(self.document_bytes)

    def difference(self, title: str, other: str) -> tuple[float, float]:
        """Bits per byte that a choice needs more than another, and the standard error of that."""
        pairs = zip(
            self.choices[title].document_bits, self.choices[other].document_bits, strict=True
        )
        more = [mine - theirs for mine, theirs in pairs]
        rate = sum(more) / sum(self.document_bytes)
        # of a ratio of sums over documents, by the delta method
        rest = [m - rate * size for m, size in zip(more, self.document_bytes, strict=True)]
        error = statistics.stdev(rest) * len(rest) ** 0.5 / sum(self.document_bytes)
        return rate, error


def measure(plan: Plan, progress: Progress, folder: Path = DEMO_DIR) -> Measured:
    """Bits per byte of each choice, fp32 first."""
    choices = {
        title: choice
        for title, choice in _choices().items()
        if plan.choices is None or title in ("fp32", _BASE, *plan.choices)
    }
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    mark = end_mark(tokenizer)
    documents = []
    for document in read_held_out(folder)[: plan.documents]:
        ids = tokenizer.encode(document.text).ids[: plan.tokens]
        documents.append(([mark, *ids], len(tokenizer.decode(ids).encode())))
    measured = Measured({}, [size for _, size in documents])
    for title, choice in choices.items():
        with TemporaryDirectory() as scratch:
            model = export_checkpoint(
                folder / "target", Path(scratch) / "model", quantization=choice
            )
            data = model.graph_file.with_name(f"{model.graph_file.name}.data").stat().st_size
            forward: Forward
            if title == _TILED:
                forward = _ours(model.path, Path(scratch))
            else:
                forward = OnnxModel(model, threads=available_threads(), capacity=WINDOW).afresh
            bits = [document_bits(forward, tokens) for tokens, _ in documents]
        size = data / model.num_parameters
        measured.choices[title] = Quality(bits, _layer_bits(choice), size)
        progress(f"{title}: {measured.bits_per_byte(title):.5f} bits per byte")
    return measured


def _ours(model: Path, scratch: Path) -> Forward:
    """The exported model as the service computes it."""
    settings = replace(
        configured().settings, target=str(model), draft=NO_DRAFTER, quant="", cache_dir=scratch
    )
    graph = open_graph(BenchModel("exported", "exported model", settings, large=False))
    return Model(graph.session, "fp32", WINDOW)


def _layer_bits(choice: Quantization) -> float:
    if choice.bits == 32:
        return 32.0
    zero_point = choice.bits if choice.bits == 4 and choice.method == "zp" else 0
    return choice.bits + (32 + zero_point) / choice.block


def table(measured: Measured) -> Table:
    """A row per choice."""

    def more(title: str, other: str) -> str:
        rate, error = measured.difference(title, other)
        return "" if title == other else f"{1000 * rate:+.2f} ± {1000 * error:.2f}"

    rows = [
        [
            title,
            f"{item.layer_bits:.3f}",
            f"{item.bytes_per_weight:.3f}",
            f"{measured.bits_per_byte(title):.4f}",
            *(more(title, other) for other in ("fp32", _BASE)),
        ]
        for title, item in measured.choices.items()
    ]
    columns = ["weights", "bits/weight, layers", "bytes/weight, file", "bits per byte"]
    return Table(
        "Quality of the demo target on held-out text",
        [*columns, "to fp32, ‰", f"to {_BASE}, ‰"],
        rows,
        notes=(
            "‰: thousandths of a bit per byte more, ± the standard error of that difference over "
            f"the {len(measured.document_bytes)} documents",
            "head and embedding in int8 unless said otherwise; rtn: rounded to nearest; no "
            "suffix: least-squares search; zp: search with zero points",
            f"{_TILED}: by ONNX Runtime's wherever nothing is said; `specops.kernels`",
            "the demo target's rows of 384 and 1,024 weights fill 1.5 and 4 blocks of 256",
        ),
    )


def result(measured: Measured, plan: Plan) -> dict[str, Any]:
    """What was measured, fit for JSON."""
    return {
        "plan": asdict(plan),
        "document_bytes": measured.document_bytes,
        "choices": {title: item._asdict() for title, item in measured.choices.items()},
    }
