"""From models' folders to runners: graphs are opened, memory is planned, passes are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from specops.config import Settings
from specops.engine.graphs import Graph, load_graph
from specops.models.folder import ModelFolder
from specops.models.graph.weight_cache import graph_key
from specops.runtime import kernels
from specops.runtime.batch import Batch
from specops.runtime.block_pool import CacheShape
from specops.runtime.calibration import FORMAT, calibrate
from specops.runtime.cost_model import CostModel
from specops.runtime.kv_cache import KvCache, PrefixCache
from specops.runtime.memory_plan import MemoryPlan, ModelSizes, plan_for_models
from specops.runtime.model_runner import ModelRunner, cache_shape
from specops.speculation.drafters.suffix import MEMORY_BYTES
from specops.system.cpus import compute_threads

WARM_UP = "running a first pass"


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that can be run; `foreign_products`: see `graphs.Graph`."""

    runner: ModelRunner
    costs: CostModel
    foreign_products: tuple[str, ...]


def open_models(
    settings: Settings, folders: Sequence[ModelFolder], report: Callable[[str], None]
) -> tuple[MemoryPlan, list[OpenModel]]:
    """Open the target and, behind it, the draft, if there is one.

    Args:
        settings: see `Settings`.
        folders: of the models.
        report: gets the names of slow steps.

    Raises:
        ModelError, ModelLoadError, MemoryPlanError: the message says what to do.
    """
    graphs = [load_graph(folder, settings, report) for folder in folders]
    shapes = [cache_shape(graph.session, settings.kv_dtype) for graph in graphs]
    plan = plan_for_models(
        settings,
        [_sizes(graph, shape) for graph, shape in zip(graphs, shapes, strict=True)],
        folders[0].context_length,
        later_bytes=MEMORY_BYTES,
    )
    runners = [
        _runner(graph, shape, settings, plan, report)
        for graph, shape in zip(graphs, shapes, strict=True)
    ]
    report("measuring what passes cost")
    return plan, [
        OpenModel(runner, calibrate(runner, _costs_file(settings, graph)), graph.foreign_products)
        for runner, graph in zip(runners, graphs, strict=True)
    ]


def _sizes(graph: Graph, shape: CacheShape) -> ModelSizes:
    folder = graph.folder
    return ModelSizes(
        shape.bytes_per_token, graph.mapped_bytes, folder.hidden_size, folder.vocab_size
    )


def _runner(
    graph: Graph,
    shape: CacheShape,
    settings: Settings,
    plan: MemoryPlan,
    report: Callable[[str], None],
) -> ModelRunner:
    """Give a graph its KV cache and run a first pass: it proves that the graph runs."""
    cache = KvCache(
        shape,
        num_blocks=plan.num_blocks,
        num_slots=plan.slots,
        context=min(plan.context, graph.folder.context_length),
        reuse=PrefixCache(settings.prefix_cache),
    )
    # Every decoding request has room in each pass, with all of the longest draft.
    most = max(settings.max_batched_tokens, plan.slots * (settings.max_k_draft + 1))
    runner = ModelRunner(graph.session, cache, max_tokens=most)
    report(WARM_UP)
    batch = Batch()
    batch.add(0, 0, [0, 0], 1)
    cache.begin(0, [0, 0])
    cache.reserve(0, 2)
    runner.forward(batch)
    cache.release(0)
    return runner


def _costs_file(settings: Settings, graph: Graph) -> Path:
    """The file with the costs of a model's passes, by threads, kernels and cache elements."""
    build = crc32(kernels.LIBRARY.read_bytes())  # newer kernels have other costs
    kernel = f"{kernels.kernel().replace(' ', '-')}-{build:08x}"
    threads = compute_threads(settings.threads)
    key = f"{graph_key(graph.folder.graph)}-{kernel}-{threads}-{settings.kv_dtype}-{FORMAT}"
    return settings.cache_dir / "costs" / f"{graph.folder.name}-{key}.json"
