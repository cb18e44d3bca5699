"""Opens ONNX Runtime sessions that share one thread pool and map their weights if possible."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from specops.runtime import kernels

VERSION: str = ort.__version__
Session = ort.InferenceSession
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_pool: list[int] = []  # number of threads in the process's pool, once it exists


class ModelLoadError(RuntimeError):
    """A graph cannot be loaded, or this service cannot run it; the message says why."""


def share_threads(threads: int) -> None:
    """Let all sessions of this process share one pool of `threads` threads.

    Target and draft model never run at the same time, and two pools would spin against each other.

    Raises:
        ModelLoadError: the process has a pool with another number of threads.
    """
    if not _pool:
        ort.set_global_thread_pool_sizes(intra_op_num_threads=threads, inter_op_num_threads=1)
        _pool.append(threads)
        kernels.share(threads)
    elif _pool != [threads]:
        raise ModelLoadError(f"this process computes with {_pool[0]} threads, not {threads}")


def open_session(graph: Path) -> ort.InferenceSession:
    """Load a graph that `specops.models.graph.prepack` wrote.

    Raises:
        ModelLoadError: the file is missing or ONNX Runtime refuses it.
    """
    options = plain_options()
    # `prepack` has already optimized the graph.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return load(graph, options)


def plain_options(weights: Path | None = None) -> ort.SessionOptions:
    """The options that all sessions share.

    Args:
        weights: folder of the external weights, for a graph loaded from memory.
    """
    options = ort.SessionOptions()
    options.enable_cpu_mem_arena = False  # an arena never frees the memory of the largest prefill
    options.log_severity_level = 3
    if weights is not None:
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(weights))
    return options


def load(graph: Path | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """Load a graph on the CPU, from its file or its content.

    Raises:
        ModelLoadError: the file is missing or ONNX Runtime refuses it.
    """
    # If the process has a pool, ONNX Runtime refuses sessions that ask for their own.
    options.use_per_session_threads = not _pool
    options.register_custom_ops_library(str(kernels.LIBRARY))
    source = graph if isinstance(graph, bytes) else str(graph)
    try:
        return ort.InferenceSession(
            source, options, providers=["CPUExecutionProvider"], enable_fallback=False
        )
    except Exception as error:  # ONNX Runtime has an exception class per status code, but no base
        name = "the graph" if isinstance(graph, bytes) else graph
        raise ModelLoadError(f"{name} cannot be loaded: {error}") from error


def bind(
    session: ort.InferenceSession,
    inputs: Mapping[str, npt.NDArray[np.generic]],
    outputs: Mapping[str, npt.NDArray[np.generic]],
) -> ort.IOBinding:
    """Bind arrays to a graph's inputs and outputs; runs then read and write their memory.

    Args:
        session: the loaded graph.
        inputs: by name, the arrays that a run reads.
        outputs: by name, the arrays that a run writes.
    """
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, _shared_value(array))
    for name, array in outputs.items():
        binding.bind_ortvalue_output(name, _shared_value(array))
    return binding


def _shared_value(array: npt.NDArray[np.generic]) -> ort.OrtValue:
    """A tensor that uses the array's memory."""
    value = ort.OrtValue.ortvalue_from_numpy(array)
    if array.size and value.data_ptr() != array.ctypes.data:
        raise RuntimeError("ONNX Runtime has copied an array that passes write to")
    return value
