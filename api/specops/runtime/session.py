"""ONNX Runtime sessions: one pool of threads for all, weights mapped where they can be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specops.runtime import kernels

VERSION: str = ort.__version__
Session = ort.InferenceSession
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
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
        kernels.share(threads)
    elif _pool != [threads]:
        raise ModelLoadError(f"this process computes with {_pool[0]} threads, not {threads}")


def open_session(graph: Path) -> ort.InferenceSession:
    """Load a graph that `specops.models.graph.prepack` wrote, on the process's threads.

    Raises:
        ModelLoadError: the file is missing or ONNX Runtime refuses it.
    """
    options = plain_options()
    # It is optimized already.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return load(graph, options)


def plain_options(weights: Path | None = None) -> ort.SessionOptions:
    """What every session has in common.

    Args:
        weights: the folder of a graph's external data, where the graph is no file.
    """
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = False  # the arena keeps the largest prefill's memory for good
    options.log_severity_level = 3
    if weights is not None:
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(weights))
    return options


def load(graph: Path | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """Load a graph, from its file or its content, on the CPU.

    Raises:
        ModelLoadError: the file is missing or ONNX Runtime refuses it.
    """
    options.use_per_session_threads = not _pool  # with a pool for all, ONNX Runtime refuses others
    kernels.register(options)
    source = graph if isinstance(graph, bytes) else str(graph)
    try:
        return ort.InferenceSession(
            source, options, providers=["CPUExecutionProvider"], enable_fallback=False
        )
    except Exception as error:  # ONNX Runtime raises a class per status code, without a base
        name = "the graph" if isinstance(graph, bytes) else graph
        raise ModelLoadError(f"{name} cannot be loaded: {error}") from error


def shared_value(array: npt.NDArray[np.generic]) -> ort.OrtValue:
    """A tensor in the array's own memory."""
    value = ort.OrtValue.ortvalue_from_numpy(array)
    if array.size and value.data_ptr() != array.ctypes.data:
        raise RuntimeError("ONNX Runtime has copied an array that passes write to")
    return value
