"""Makes sessions of one operator, and cases for its tests."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from specops.runtime import kernels
from specops.runtime.session import load, plain_options, share_threads
from tests.conftest import THREADS as USUAL_THREADS

THREADS = int(os.environ.get("KERNEL_TEST_THREADS", USUAL_THREADS))  # one pool for a process
# Inputs of int64; the others are float32.
WHOLE = ("spans", "progress", "block_tables", "cache", "kept_inputs", "ids")


def operator(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    weights: Mapping[str, np.ndarray] | None = None,
    domain: str = kernels.DOMAIN,
    **attributes: Any,
) -> Callable[..., list[np.ndarray]]:
    """A function that computes the outputs from the inputs that are not among the weights."""
    weights = weights or {}
    given = [item for item in inputs if item and item not in weights]
    graph = helper.make_graph(
        [helper.make_node(name, inputs, outputs, domain=domain, **attributes)],
        "one node",
        [
            helper.make_tensor_value_info(
                item, TensorProto.INT64 if item in WHOLE else TensorProto.FLOAT, None
            )
            for item in given
        ],
        [helper.make_tensor_value_info(item, TensorProto.FLOAT, None) for item in outputs if item],
        [numpy_helper.from_array(value, item) for item, value in weights.items()],
    )
    domains = (("", 21), ("com.microsoft", 1), (kernels.DOMAIN, 1))
    opsets = [helper.make_opsetid(name, version) for name, version in domains]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    share_threads(THREADS)
    session = load(model.SerializeToString(), plain_options())
    return lambda **feeds: session.run([item for item in outputs if item], feeds)


def covering(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which every pair of values of two factors occurs: a covering array, made greedily.

    A full product of the factors would only add cases for three or more factors at once.
    """
    places = [range(len(factor)) for factor in factors]
    pairs = {
        case: {*itertools.combinations(enumerate(case), 2)} for case in itertools.product(*places)
    }
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(pairs, key=lambda case: len(missing & pairs[case]))
        missing -= pairs[best]
        chosen.append(tuple(factor[place] for factor, place in zip(factors, best, strict=True)))
    return chosen
