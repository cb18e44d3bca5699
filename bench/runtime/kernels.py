"""Where the time of a pass goes: ONNX Runtime's own profile, operator by operator.

Weights should stream at the memory's speed; what is neither a product with weights nor attention
is the graph's overhead. Shares are of the time inside kernels, added up by the profiler; the time
of a whole pass is taken in a session without it, since profiling itself costs.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime as ort

from bench.models import BenchModel, Progress
from bench.tools.report import Outcome, Table
from specops.models.graph.weight_cache import prepacked_graph
from specops.runtime import session
from specops.runtime.batch import Batch
from specops.runtime.kernels import ATTENTION, BLOCK_TOKENS, MATMUL
from specops.runtime.kv_cache import KvCache, PrefixCache
from specops.runtime.model_runner import ModelRunner, cache_shape
from specops.system.cpus import available_threads

_PAST = 200  # tokens in every slot's cache before a pass
_CONTEXT, _SLOTS, _PASS_TOKENS = 512, 8, 128
_NORM = "SimplifiedLayerNormalization"
_GROUPS = {
    **dict.fromkeys((MATMUL, "MatMulNBits", "MatMul"), "weights"),
    ATTENTION: "attention",
    **dict.fromkeys((_NORM, f"Skip{_NORM}", "SkipLayerNormalization"), "norms"),
    **dict.fromkeys(("QuickGelu", "FastGelu", "Relu", "Mul"), "activation"),
}
GROUPS = ("weights", "attention", "norms", "activation", "rest")
PASSES = {  # requests in the pass, tokens of each, and how many of its last ones need logits
    "1 token": (1, 1, 1),
    "2 tokens": (1, 2, 2),
    "4 tokens": (1, 4, 4),
    "8 requests": (8, 1, 1),
    "4 requests, 3 tokens each": (4, 3, 3),
    "128 prompt tokens": (1, 128, 1),
}

Kernels = dict[str, float]
"""Milliseconds of a pass by operator."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of pass: milliseconds of the whole of it, and of each operator's kernels."""

    name: str
    milliseconds: float
    kernels: Kernels

    def share(self, group: str) -> float:
        """A group's part of the kernels' time."""
        found = sum(ms for op, ms in self.kernels.items() if _GROUPS.get(op, "rest") == group)
        return found / sum(self.kernels.values())

    @property
    def overhead(self) -> float:
        """The part of what is neither a product with weights nor attention."""
        return 1 - self.share("weights") - self.share("attention")


def run(model: BenchModel, rounds: int, progress: Progress) -> Outcome:
    """Profile a model's passes, each kind `rounds` times."""
    return outcome(model, measure(model, rounds, progress))


def measure(model: BenchModel, rounds: int, progress: Progress) -> list[Profile]:
    """Profile every kind of pass `rounds` times; the pass before them is not counted."""
    session.share_threads(model.settings.threads or available_threads())
    graph = _graph(model)
    runner = _runner(_open(graph), model)
    found = []
    for name in PASSES:
        progress(f"kernels: {name}")
        milliseconds = 1e3 * median(_timed(_pass(runner, name), rounds))
        found.append(Profile(name, milliseconds, _profiled(graph, model, name, rounds)))
    return found


def outcome(model: BenchModel, profiles: list[Profile]) -> Outcome:
    """A row per kind of pass."""
    rows = []
    for profile in profiles:
        shares = (f"{profile.share(group):.1%}" for group in GROUPS)
        row = (profile.name, f"{profile.milliseconds:.1f}", *shares, f"{profile.overhead:.1%}")
        rows.append(row)
    columns = ("pass", "ms", *GROUPS, "neither weights nor attention")
    notes = (f"over {_PAST} tokens of cache; medians; shares of the time inside kernels",)
    table = Table(f"Kernels: {model.title}", columns, rows, notes)
    passes = [asdict(profile) for profile in profiles]
    return Outcome({"model": model.key, "past_tokens": _PAST, "passes": passes}, [table])


def _graph(model: BenchModel) -> Path:
    """The file that the engine loads."""
    folder = model.folder()
    name = f"{folder.name}-{folder.quant}"
    return prepacked_graph(folder.graph, name, model.settings.cache_dir, lambda text: None)


def _open(graph: Path, profile: Path | None = None) -> ort.InferenceSession:
    options = session.plain_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    return session.load(graph, options)


def _runner(opened: ort.InferenceSession, model: BenchModel) -> ModelRunner:
    """All slots hold `_PAST` tokens: zeros, since what keys say does not change the time."""
    cache = KvCache(
        cache_shape(opened, model.settings.kv_dtype),
        num_blocks=_SLOTS * -(-_CONTEXT // BLOCK_TOKENS),
        num_slots=_SLOTS,
        context=_CONTEXT,
        reuse=PrefixCache.OFF,
    )
    past = [0] * _PAST
    for slot in range(_SLOTS):
        cache.begin(slot, [*past, 0])
        cache.reserve(slot, _CONTEXT)
        cache.commit(slot, past, _PAST)
    return ModelRunner(opened, cache, max_tokens=_PASS_TOKENS)


def _pass(runner: ModelRunner, name: str) -> Callable[[], None]:
    """A pass that leaves the cache as long as it was."""
    requests, count, logits = PASSES[name]
    tokens = [index * 7919 % runner.vocab_size for index in range(count)]

    def run() -> None:
        batch = Batch()
        for slot in range(requests):
            batch.add(slot, _PAST, tokens, logits)
        runner.forward(batch)

    return run


def _timed(run: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of each pass; one before the first is not counted."""
    seconds = []
    for number in range(-1, rounds):
        start = time.perf_counter()
        run()
        if number >= 0:
            seconds.append(time.perf_counter() - start)
    return seconds


def _profiled(graph: Path, model: BenchModel, name: str, rounds: int) -> Kernels:
    """Mean milliseconds of each operator in a pass."""
    with TemporaryDirectory() as folder:
        opened = _open(graph, Path(folder) / "profile")
        _timed(_pass(_runner(opened, model), name), rounds)
        opened.end_profiling()
        (file,) = Path(folder).iterdir()
        events = json.loads(file.read_text(encoding="utf-8"))
    return kernels(events, rounds)


def kernels(events: list[dict[str, Any]], rounds: int) -> Kernels:
    """Mean milliseconds of each operator over the last `rounds` passes of a profile's events."""
    start = [event["ts"] for event in events if event["name"] == "model_run"][-rounds]
    total: Counter[str] = Counter()
    for event in events:
        if event["name"].endswith("_kernel_time") and event["ts"] >= start:
            total[event["args"]["op_name"]] += event["dur"]
    return {op: microseconds / 1e3 / rounds for op, microseconds in total.most_common()}
