"""What each element type of the KV cache costs in quality, and how many bytes it takes.

The same texts go through the same graph with each kind of cache. KL is that of the next token's
distribution with this cache from the one with an fp32 cache, in nats, over every position of
held-out documents, on which the demo pair was not trained. Bytes are those of keys and values per
token, padding and scales included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np

from bench.models import BenchModel
from bench.runtime.forward import Divergence, divergence, log_softmax, passes
from bench.tools.report import Outcome, Table, progress
from specops.engine.engine import NO_DRAFTER, Engine
from specops.presets import DEMO
from specops.runtime.kernels import KV_DTYPES
from training.corpus import read_held_out

_BASE = "fp32"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: the first `tokens` of the first `documents`; None: of all."""

    documents: int | None
    tokens: int


FULL = Plan(documents=None, tokens=1024)
QUICK = Plan(documents=2, tokens=96)


@dataclass(slots=True)
class Kind:
    """One kind of cache: bytes per token, and the divergences of each document."""

    bytes_per_token: float
    documents: list[Divergence]

    def figures(self) -> dict[str, float]:
        """Figures over all positions; `error` is the mean KL's standard error over documents."""
        kl = np.concatenate([document.kl for document in self.documents])
        means = [float(document.kl.mean()) for document in self.documents]
        return {
            "bytes_per_token": self.bytes_per_token,
            "mean_kl": float(kl.mean()),
            "error": stdev(means) / len(means) ** 0.5 if len(means) > 1 else 0.0,
            "kl_99": float(np.quantile(kl, 0.99)),
            "most_kl": float(kl.max()),
            "flipped": float(np.concatenate([d.flipped for d in self.documents]).mean()),
        }


def folder_model(folder: Path, base: BenchModel) -> BenchModel:
    """A model in a folder, an export or a checkpoint, loaded with the settings of another one."""
    settings = replace(base.settings, target=str(folder), draft=NO_DRAFTER, quant="")
    return BenchModel(folder.name, folder.name, settings)


def in_fp32(base: BenchModel) -> BenchModel:
    """The same model with fp32 weights.

    Products with quantized weights round every token's activations to 8 bits. Then the smallest
    difference in a cache moves some of them by a step. fp32 weights show the cache's part alone.
    """
    settings = replace(base.settings, quant="fp32", draft=NO_DRAFTER)
    return BenchModel(f"{base.key}-fp32", f"{base.title}, fp32 weights", settings)


def run(base: BenchModel, folders: Sequence[Path], plan: Plan) -> Outcome:
    """Measure every kind of cache on a model and on the models in folders.

    The demo pair is also measured with fp32 weights.
    """
    models = [base, *(folder_model(folder, base) for folder in folders)]
    if base.settings.model == DEMO and not base.settings.target:
        models.insert(1, in_fp32(base))
    return outcome({model.title: _measure(model, plan) for model in models}, plan)


def _measure(model: BenchModel, plan: Plan) -> dict[str, Kind]:
    """Divergences of each kind of cache from fp32."""
    sizes = {"draft": NO_DRAFTER, "slots": 1, "context": plan.tokens, "prefix_cache": "off"}
    settings = replace(model.settings, **sizes)
    engines = {dtype: Engine.load(replace(settings, kv_dtype=dtype)) for dtype in KV_DTYPES}
    runners = {dtype: engine.scheduler.target for dtype, engine in engines.items()}
    kinds = {name: Kind(runner.cache.shape.bytes_per_token, []) for name, runner in runners.items()}
    documents = read_held_out()[: plan.documents]
    for number, document in enumerate(documents, start=1):
        tokens = engines[_BASE].encode(document.text)[: plan.tokens]
        parts: dict[str, list[Divergence]] = {dtype: [] for dtype in runners}
        # Side by side, so that memory holds the logits of one pass of each.
        for logits in zip(*(passes(runner, tokens) for runner in runners.values()), strict=True):
            logs = dict(zip(runners, map(log_softmax, logits), strict=True))
            for dtype, found in parts.items():
                found.append(divergence(logs[_BASE], logs[dtype]))
        for dtype, found in parts.items():
            whole = (np.concatenate(values) for values in zip(*found, strict=True))
            kinds[dtype].documents.append(Divergence(*whole))
        progress(f"{model.title}: {number} of {len(documents)} documents")
    return kinds


def outcome(found: dict[str, dict[str, Kind]], plan: Plan) -> Outcome:
    """The table of all models."""
    rows: list[Sequence[str]] = []
    record: dict[str, Any] = {}
    for title, kinds in found.items():
        record[title] = {dtype: kind.figures() for dtype, kind in kinds.items()}
        whole = record[title][_BASE]["bytes_per_token"]
        for dtype, item in record[title].items():
            size = item["bytes_per_token"]
            cells = (
                f"{1000 * item['mean_kl']:.4f} ± {1000 * item['error']:.4f}",
                f"{1000 * item['kl_99']:.3f}",
                f"{1000 * item['most_kl']:.2f}",
                f"{item['flipped']:.2%}",
            )
            told = [""] * len(cells) if dtype == _BASE else cells
            rows.append((title, dtype, f"{size:,.0f}", f"{size / whole:.2f}", *told))
    counted = next(iter(next(iter(found.values())).values())).documents
    positions = sum(len(document.kl) for document in counted)
    table = Table(
        "Elements of the KV cache",
        ("model", "elements", "bytes/token", "of fp32", "mean KL, millinats",
         "99 % of KL within", "largest KL", "other likeliest token"),
        rows,
        (
            "KL from the same graph with an fp32 cache, over every position of "
            f"{len(counted)} held-out documents, {plan.tokens} tokens of each at most "
            f"({positions:,} by the first model's tokenizer); ± the standard error over documents",
            "bytes/token: keys and values of all layers, padding and scales included",
            "products with weights of 8 and 4 bits round activations to 8 bits, so the smallest "
            "difference moves some of them by a step; with fp32 weights the cache's part is alone",
        ),
    )  # fmt: skip
    return Outcome({"plan": asdict(plan), "models": record}, [table])
