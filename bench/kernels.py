"""Where the time of a pass goes: ONNX Runtime's own profile, operator by operator.

Weights should stream at the memory's speed; what is neither a product with weights nor attention
is the graph's overhead. Shares are of the time inside kernels, added up by the profiler; the time
of a whole pass is taken in a session without it, since profiling itself costs, and in turn with the
same pass by ONNX Runtime's own kernels.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime as ort

from bench.models import BenchModel, GraphFile, Progress
from bench.report import Table
from specops.cpus import available_threads
from specops.decoder import Decoder
from specops.kernels import OPERATOR
from specops.session import load, plain_options, share_threads

_PAST = 200  # tokens in every row's cache before a pass
_CAPACITY, _ROWS, _WIDTH = 512, 8, 128
_ATTENTION = "GroupQueryAttention"
_GROUPS = {
    OPERATOR: "weights",
    "MatMulNBits": "weights",
    "MatMul": "weights",
    "MatMulIntegerToFloat": "weights",
    _ATTENTION: "attention",
    "SkipSimplifiedLayerNormalization": "norms",
    "SimplifiedLayerNormalization": "norms",
    "SkipLayerNormalization": "norms",
    "QuickGelu": "activation",
    "FastGelu": "activation",
    "Relu": "activation",
    "Mul": "activation",
}
GROUPS = ("weights", "attention", "norms", "activation", "rest")
PASSES = ("1 token", "2 tokens", "4 tokens", "8 rows", "128 prompt tokens")

Kernels = Mapping[str, float]
"""Milliseconds of a pass by operator."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of pass: milliseconds of the whole of it, and of each operator's kernels.

    `onnxruntimes` are those of the whole pass where ONNX Runtime computes the products.
    """

    name: str
    milliseconds: float
    onnxruntimes: float
    kernels: Kernels

    def share(self, group: str) -> float:
        """A group's part of the kernels' time."""
        found = sum(ms for op, ms in self.kernels.items() if _GROUPS.get(op, "rest") == group)
        return found / sum(self.kernels.values())

    @property
    def overhead(self) -> float:
        """The part of what is neither a product with weights nor attention."""
        return 1 - self.share("weights") - self.share("attention")


def measure(model: BenchModel, rounds: int, progress: Progress) -> list[Profile]:
    """Profile the passes of a model.

    Args:
        model: what to load.
        rounds: passes of each kind, at least 1; the one before them is not counted.
        progress: told what is being measured.
    """
    share_threads(model.settings.threads or available_threads())
    graph = model.graph()
    theirs = replace(model, settings=replace(model.settings, kernels="onnxruntime")).graph()
    decoders = [_decoder(_session(file)) for file in (graph, theirs)]
    found = []
    for name in PASSES:
        progress(f"kernels: {name}")
        times = _in_turn([_pass(decoder, name) for decoder in decoders], rounds)
        milliseconds, other = (1e3 * median(seconds) for seconds in times)
        found.append(Profile(name, milliseconds, other, _profiled(graph, name, rounds)))
    return found


def table(model: BenchModel, profiles: list[Profile]) -> Table:
    """One row per kind of pass."""
    rows = [
        (
            profile.name,
            f"{profile.milliseconds:.1f}",
            f"{profile.onnxruntimes:.1f}",
            f"{profile.onnxruntimes / profile.milliseconds:.2f}",
            *(f"{profile.share(group):.1%}" for group in GROUPS),
            f"{profile.overhead:.1%}",
        )
        for profile in profiles
    ]
    columns = ("pass", "ms", "onnxruntime's, ms", "ratio", *GROUPS, "neither weights nor attention")
    notes = (
        f"over {_PAST} tokens of cache; shares of the time inside kernels",
        "onnxruntime's: the same with SPECOPS_KERNELS=onnxruntime, pass by pass in turn; medians",
        "prompt tokens: read by the graph that decodes, as with SPECOPS_PREFILL=same",
    )
    return Table(f"Kernels: {model.title}", columns, rows, notes)


def result(model: BenchModel, profiles: list[Profile]) -> dict[str, Any]:
    """The same for programs."""
    passes = [
        {
            "pass": profile.name,
            "milliseconds": round(profile.milliseconds, 3),
            "onnxruntimes_milliseconds": round(profile.onnxruntimes, 3),
            "kernel_milliseconds": {op: round(ms, 4) for op, ms in profile.kernels.items()},
            "overhead_share": round(profile.overhead, 4),
        }
        for profile in profiles
    ]
    return {"model": model.key, "past_tokens": _PAST, "passes": passes}


def _session(graph: GraphFile, profile: Path | None = None) -> ort.InferenceSession:
    options = plain_options()
    options.use_per_session_threads = False
    if graph.prepacked:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    return load(graph.path, options, whole_scores=graph.whole_scores)


def _decoder(session: ort.InferenceSession) -> Decoder:
    decoder = Decoder(session, rows=_ROWS, capacity=_CAPACITY, max_width=_WIDTH)
    for row in range(_ROWS):
        decoder.cache.lengths[row] = _PAST  # zeros: what the keys say does not change the time
    return decoder


def _pass(decoder: Decoder, name: str) -> Callable[[], None]:
    """A pass that leaves the cache as long as it was."""
    tokens = [index * 7919 % decoder.vocab_size for index in range(_WIDTH)]
    count = int(name.split(maxsplit=1)[0])

    def run() -> None:
        if "rows" in name:
            decoder.decode(0, tokens[:count])
        else:
            decoder.extend(0, tokens[:count], logits=1 if "prompt" in name else None)
        for row in range(_ROWS):
            decoder.cache.truncate(row, _PAST)

    return run


def _in_turn(passes: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Seconds of each pass, round by round; the round before the first is not counted."""
    seconds: list[list[float]] = [[] for _ in passes]
    for number in range(-1, rounds):
        for run, taken in zip(passes, seconds, strict=True):
            start = time.perf_counter()
            run()
            if number >= 0:
                taken.append(time.perf_counter() - start)
    return seconds


def _profiled(graph: GraphFile, name: str, rounds: int) -> Kernels:
    """Mean milliseconds of each operator in a pass."""
    with TemporaryDirectory() as folder:
        session = _session(graph, Path(folder) / "profile")
        _in_turn([_pass(_decoder(session), name)], rounds)
        session.end_profiling()
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
