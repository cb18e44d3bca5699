"""ONNX Runtime sessions: one pool of threads for all, weights mapped where they can be."""

from __future__ import annotations

import os
from pathlib import Path

import onnxruntime as ort

from specops import kernels

VERSION: str = ort.__version__
Session = ort.InferenceSession
_WHOLE_SCORES = "ORT_GQA_DISABLE_FLASH_ATTENTION"  # GroupQueryAttention reads it when it is loaded
_pool: list[int] = []  # the size of the process's thread pool, which is made once


class ModelLoadError(RuntimeError):
    """A graph that cannot be loaded or does not keep the contract; the message says why."""


def share_threads(threads: int) -> None:
    """Give all sessions of this process one pool of `threads` threads.

    Target and draft never run at the same time; two pools would spin against each other.

    Raises:
        ModelLoadError: the process's pool was made before, with another number of threads.
    """
    if not _pool:
        ort.set_global_thread_pool_sizes(intra_op_num_threads=threads, inter_op_num_threads=1)
        _pool.append(threads)
    elif _pool != [threads]:
        raise ModelLoadError(f"this process computes with {_pool[0]} threads, not {threads}")


def open_session(
    graph: Path, *, prepacked: bool = False, whole_scores: bool = False
) -> ort.InferenceSession:
    """Load a graph on the CPU, on the process's shared threads.

    Args:
        graph: the graph; its weights lie beside it.
        prepacked: it was written by `specops.models.prepack` and is optimized already.
        whole_scores: attention computes all scores of a pass and then weighs the values with them,
            instead of tile by tile. That takes 0.02 ms instead of 0.05 for one token that looks
            back at 200, 0.09 instead of 0.23 at 1,000, 0.15 instead of 0.48 for 8 rows of 200, and
            a tenth less for a chunk of a prompt (a layer of TinyLlama's shape, int4 or not;
            2 cores, AMD EPYC, onnxruntime 1.31.1). The scores have to be held meanwhile: from
            32 MiB on the kernel hands out their pages anew for every pass, which takes as long
            again as all the rest.

    Raises:
        ModelLoadError: the file is missing or ONNX Runtime refuses it.
    """
    options = plain_options()
    options.use_per_session_threads = False
    if prepacked:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return load(graph, options, whole_scores=whole_scores)


def plain_options() -> ort.SessionOptions:
    """What every session has in common."""
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = False  # the arena keeps the largest prefill's memory for good
    options.log_severity_level = 3
    return options


def load(
    graph: Path, options: ort.SessionOptions, *, whole_scores: bool = False
) -> ort.InferenceSession:
    """Load a graph on the CPU; `whole_scores`: see `open_session`.

    Raises:
        ModelLoadError: the file is missing or ONNX Runtime refuses it.
    """
    os.environ[_WHOLE_SCORES] = str(int(whole_scores))
    kernels.register(options)
    try:
        return ort.InferenceSession(
            str(graph), options, providers=["CPUExecutionProvider"], enable_fallback=False
        )
    except Exception as error:  # ONNX Runtime raises a class per status code, without a base
        raise ModelLoadError(f"{graph} cannot be loaded: {error}") from error
