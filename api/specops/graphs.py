"""From a model's folder to a decoder: open its graphs, plan memory, try passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specops import kernels
from specops.config import Settings
from specops.decoder import Decoder, cache_shape
from specops.drafters.ngram_cache import ENTRY_BYTES
from specops.memory import page_cache_room
from specops.memory_plan import (
    Demand,
    MemoryPlan,
    Supply,
    pass_bytes,
    plan_memory,
    scores_bytes,
)
from specops.models.folder import ModelFolder
from specops.models.weight_cache import prepacked_graph, used_bytes
from specops.session import Session, open_session

log = logging.getLogger(__name__)

WARM_UP = "running a first pass"
_ONNXRUNTIME = "onnxruntime"
_LEAST_WIDTH = 16  # what the check for exactness needs
_MOST_SCORES = 32 << 20  # bytes that glibc keeps when they are freed; see `open_session`
_UNKNOWN_HIDDEN, _UNKNOWN_HEADS = 4096, 32  # where a model's description does not say
_FULL_SHARE = 0.75  # of the room for weights: the rest is the KV cache's and the requests'


@dataclass(frozen=True, slots=True)
class Graph:
    """A loaded graph. `mapped_bytes` of its weights lie in the page cache, 0 if it copied them.

    `prefill` is its form that reads prompts faster, where there is one; `kernels` is who computes
    products with weights.
    """

    folder: ModelFolder
    session: Session
    prefill: Session | None
    mapped_bytes: int
    kernels: str


def load_graph(
    folder: ModelFolder,
    settings: Settings,
    report: Callable[[str], None],
    *,
    prefill: str = "same",
) -> Graph:
    """Open a model's graph, its weights mapped where they can be.

    Args:
        folder: the model.
        settings: see `Settings`.
        report: told what takes time.
        prefill: weights that read prompts, as `SPECOPS_PREFILL` says it.

    Raises:
        ModelLoadError: ONNX Runtime does not take it.
    """
    name = f"{folder.name}-{folder.quant}"
    prepacked = faster = None
    tiles = own_kernels(settings)
    if settings.prepack:
        cache = settings.cache_dir
        # Own kernels read prompts in less time than ONNX Runtime's do with all weights in 8 bits.
        if prefill == "int8" or (prefill == "auto" and not tiles and _room_for_both(folder)):
            faster = prepacked_graph(
                folder.graph, name, cache, report, tiles=tiles, int8_prefill=True
            )
        # Last, so that its weights are what stays in memory if not all of them fit.
        prepacked = prepacked_graph(folder.graph, name, cache, report, tiles=tiles)
    report(f"opening {prepacked or folder.graph}")
    session = open_session(
        prepacked or folder.graph,
        prepacked=prepacked is not None,
        whole_scores=whole_scores(folder, settings, reads_prompts=faster is None),
    )
    reader = None if faster is None else open_session(faster, prepacked=True)
    # The files hold more than that: the originals of packed weights, which nobody reads.
    files = [path.parent for path in (prepacked, faster) if path is not None]
    mapped = sum(used_bytes(path) for path in files)
    own = kernels.kernel() if tiles and prepacked is not None else None
    return Graph(folder, session, reader, mapped, own or _ONNXRUNTIME)


def whole_scores(folder: ModelFolder, settings: Settings, *, reads_prompts: bool) -> bool:
    """Whether attention is faster without tiles, see `open_session`, in a graph that decodes.

    Args:
        folder: the model.
        settings: see `Settings`.
        reads_prompts: the graph reads prompts too; there is none beside it that does.
    """
    width = _pass_width(settings) if reads_prompts else settings.max_k_draft + 1
    context = min(settings.context or folder.context_length, folder.context_length)
    scores = context * scores_bytes(width, _heads(folder))
    return folder.scaled_queries and scores < _MOST_SCORES


def planned(settings: Settings, graphs: Sequence[Graph]) -> MemoryPlan:
    """Rows and context for loaded graphs, the target first; the plan goes to the log.

    Raises:
        MemoryPlanError: see `plan_memory`.
    """
    width = _pass_width(settings)
    passes = [
        pass_bytes(
            width=width,
            hidden=graph.folder.hidden_size or _UNKNOWN_HIDDEN,
            heads=_heads(graph.folder),
            vocab=graph.folder.vocab_size,
            logits=width,
        )
        for graph in graphs
    ]
    demand = Demand(
        kv_token_bytes=sum(cache_shape(graph.session).bytes_per_token for graph in graphs),
        mapped_weights=sum(graph.mapped_bytes for graph in graphs),
        target_weights=graphs[0].mapped_bytes,
        fixed_pass_bytes=max(fixed for fixed, _ in passes),  # one model computes at a time
        context_pass_bytes=max(per_token for _, per_token in passes),
        context=graphs[0].folder.context_length,
    )
    plan = plan_memory(
        Supply.read().less(settings.shared_ngrams * ENTRY_BYTES),
        demand,
        rows=settings.rows,
        context=settings.context,
        shrink=settings.memory_fit == "shrink",
    )
    for line in plan.lines():
        log.info("memory: %s", line)
    if plan.shrunk:
        log.warning("less than was asked for fits: %d rows of %d tokens", plan.rows, plan.context)
    return plan


def _heads(folder: ModelFolder) -> int:
    return folder.num_heads or _UNKNOWN_HEADS


def _pass_width(settings: Settings) -> int:
    """Tokens of the widest pass."""
    return max(settings.prefill_chunk, settings.max_k_draft + 1, _LEAST_WIDTH)


def open_decoder(
    graph: Graph, settings: Settings, rows: int, capacity: int, report: Callable[[str], None]
) -> Decoder:
    """Give a graph its KV cache and run first passes.

    Args:
        graph: from `load_graph`.
        settings: see `Settings`.
        rows: of the cache.
        capacity: tokens a row.
        report: told what takes time.
    """
    decoder = Decoder(
        graph.session,
        rows=rows,
        capacity=capacity,
        max_width=_pass_width(settings),
        prefill_session=graph.prefill,
    )
    report(WARM_UP)
    # It allocates; it also proves that the graphs run before anyone is served.
    decoder.prefill(0, [0, 0])
    decoder.extend(0, [0, 0])
    decoder.cache.truncate(0, 0)
    return decoder


def own_kernels(settings: Settings) -> bool:
    """Whether products are computed by `specops.kernels`."""
    return settings.kernels == "auto" and kernels.kernel() is not None


def _room_for_both(folder: ModelFolder) -> bool:
    """Whether the weights fit twice: as they are, and in 8 bits."""
    stored = sum(path.stat().st_size for path in folder.graph.parent.glob(f"{folder.graph.name}*"))
    return _FULL_SHARE * page_cache_room() >= stored + folder.parameters
