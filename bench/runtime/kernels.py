"""Splits the time of a forward pass by operator, from ONNX Runtime's profile.

Weights should stream at the speed of memory. Everything but products with weights and attention is
overhead of the graph. Shares are of the time inside kernels, which the profiler sums up. The time
of a whole pass comes from a session without the profiler, because profiling takes time.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime as ort

from bench.models import BenchModel
from bench.tools.report import Outcome, Table, progress
from bench.tools.worker import timed
from specops.models.graph.weight_cache import prepacked_graph
from specops.runtime import session
from specops.runtime.batch import Batch
from specops.runtime.kernels import ATTENTION, BLOCK_TOKENS, MATMUL
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.model_runner import ModelRunner, cache_shape
from specops.system.cpus import available_threads

_PAST = 200  # tokens in every slot's cache before a pass
_CONTEXT, _SLOTS, _PASS_TOKENS = 512, 8, 128
_GROUPS = {MATMUL: "weights", "MatMulNBits": "weights", "MatMul": "weights", ATTENTION: "attention"}
GROUPS = ("weights", "attention", "rest")
PASSES = {  # requests in the pass, tokens of each, how many of them need logits
    "1 token": (1, 1, 1),
    "2 tokens": (1, 2, 2),
    "4 tokens": (1, 4, 4),
    "8 requests": (8, 1, 1),
    "4 requests, 3 tokens each": (4, 3, 3),
    "128 prompt tokens": (1, 128, 1),
}
FULL, QUICK = 10, 1  # rounds


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of pass: its milliseconds in all, and by operator."""

    name: str
    milliseconds: float
    kernels: dict[str, float]

    def share(self, group: str) -> float:
        """A group's share of the time in kernels."""
        found = sum(ms for op, ms in self.kernels.items() if _GROUPS.get(op, "rest") == group)
        return found / sum(self.kernels.values())


def run(model: BenchModel, rounds: int) -> Outcome:
    """Profile every kind of pass `rounds` times, after one that does not count."""
    session.share_threads(model.settings.threads or available_threads())
    folder = model.folder()
    name = f"{folder.name}-{folder.quant}"
    cache = model.settings.cache_dir
    graph = prepacked_graph(folder.graph, name, cache, lambda text: None)  # as the engine loads it
    runner = _runner(_open(graph), model)
    profiles, rows = [], []
    for name in PASSES:
        progress(f"kernels: {name}")
        milliseconds = 1e3 * median(_timed(runner, name, rounds))
        profile = Profile(name, milliseconds, _profiled(graph, model, name, rounds))
        profiles.append(profile)
        shares = (f"{profile.share(group):.1%}" for group in GROUPS)
        rows.append((name, f"{milliseconds:.1f}", *shares))
    notes = (f"over {_PAST} tokens of cache; medians; shares of the time inside kernels",)
    table = Table(f"Kernels: {model.title}", ("pass", "ms", *GROUPS), rows, notes)
    passes = [asdict(profile) for profile in profiles]
    return Outcome({"model": model.key, "past_tokens": _PAST, "passes": passes}, [table])


def _open(graph: Path, profile: Path | None = None) -> ort.InferenceSession:
    options = session.plain_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    return session.load(graph, options)


def _runner(opened: ort.InferenceSession, model: BenchModel) -> ModelRunner:
    """A runner whose slots hold `_PAST` zeros: the values of keys do not change the time."""
    cache = KvCache(
        cache_shape(opened, model.settings.kv_dtype),
        num_blocks=_SLOTS * -(-_CONTEXT // BLOCK_TOKENS),
        num_slots=_SLOTS,
        context=_CONTEXT,
        reuse=PrefixSharing.OFF,
    )
    past = [0] * _PAST
    for slot in range(_SLOTS):
        cache.allocate(slot, [*past, 0])
        cache.reserve(slot, _CONTEXT)
        cache.zero(slot)
        cache.commit(slot, past, _PAST)
    return ModelRunner(opened, cache, max_tokens=_PASS_TOKENS)


def _timed(runner: ModelRunner, name: str, rounds: int) -> list[float]:
    """Seconds of each pass. No tokens are committed, so all passes have the same past."""
    requests, count, logits = PASSES[name]
    tokens = [index * 7919 % runner.vocab_size for index in range(count)]

    def forward() -> None:
        batch = Batch()
        for slot in range(requests):
            batch.add(slot, _PAST, tokens, logits)
        runner.forward(batch)

    return timed(forward, rounds)


def _profiled(graph: Path, model: BenchModel, name: str, rounds: int) -> dict[str, float]:
    """Mean milliseconds of each operator in a pass."""
    with TemporaryDirectory() as folder:
        opened = _open(graph, Path(folder) / "profile")
        _timed(_runner(opened, model), name, rounds)
        opened.end_profiling()
        (file,) = Path(folder).iterdir()
        events = json.loads(file.read_text(encoding="utf-8"))
    return kernels(events, rounds)


def kernels(events: list[dict[str, Any]], rounds: int) -> dict[str, float]:
    """Mean milliseconds of each operator over the last `rounds` passes of a profile's events."""
    start = [event["ts"] for event in events if event["name"] == "model_run"][-rounds]
    total: Counter[str] = Counter()
    for event in events:
        if event["name"].endswith("_kernel_time") and event["ts"] >= start:
            total[event["args"]["op_name"]] += event["dur"]
    return {op: microseconds / 1e3 / rounds for op, microseconds in total.most_common()}
