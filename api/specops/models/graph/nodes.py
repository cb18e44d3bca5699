"""Reads and replaces the nodes of an ONNX graph: what all steps of the rewriting share."""

from collections.abc import Iterable
from typing import Any

import onnx
from onnx import helper

from specops.models.errors import ModelError
from specops.runtime import kernels

ATTENTION = "GroupQueryAttention"  # of exports
# Our operators in which a token sees earlier tokens, and how many of their inputs have tokens.
MIXING = {
    kernels.ATTENTION: 3,
    kernels.SHORT_CONV: 1,
    kernels.GATED_DELTA: 4,
    kernels.STATE_SPACE: 3,
}
DEFAULT_DOMAINS = ("", "ai.onnx")


class RefusedGraphError(ModelError):
    """The graph has a part that the engine does not understand; the message names it."""


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return a node's attributes by name."""
    return {item.name: helper.get_attribute_value(item) for item in node.attribute}


def named(node: onnx.NodeProto) -> str:
    """Return how messages name a node."""
    domain = "" if node.domain in DEFAULT_DOMAINS else f"{node.domain}."
    return f"node {node.name or node.output[0]} ({domain}{node.op_type})"


def input_of(node: onnx.NodeProto, place: int) -> str:
    """Return the name of an input; empty if the node leaves this input out."""
    return str(node.input[place]) if len(node.input) > place else ""


def trimmed(*names: str) -> list[str]:
    """Return the names of inputs or outputs without the empty ones at the end."""
    found = list(names)
    while not found[-1]:
        found.pop()
    return found


def mixers(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes of an export or a rewritten graph in which tokens see others, one per layer.

    A convolution of what a state space or a delta rule reads belongs to that one.
    """
    found = [node for node in nodes if node.op_type == ATTENTION or node.op_type in MIXING]
    read = {node.input[0] for node in found}
    return [node for node in found if node.output[0] not in read]


def set_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Replace all nodes of a graph; the new nodes may be the graph's own."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


class Wiring:
    """The producers and consumers of a graph's tensors, as the graph is now.

    Attributes:
        makers: tensor name → the node that produces it.
        readers: tensor name → the nodes that read it, once for each input.
        outputs: names of the graph's outputs.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.makers = {name: node for node in graph.node for name in node.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self.outputs = {item.name for item in graph.output}
        for node in graph.node:
            for name in filter(None, node.input):
                self.readers.setdefault(name, []).append(node)

    def only_read_by(self, name: str, nodes: Iterable[onnx.NodeProto]) -> bool:
        """Return whether no other node reads the tensor and it is no output of the graph."""
        readers = {node.output[0] for node in self.readers.get(name, ())}
        return name not in self.outputs and readers <= {node.output[0] for node in nodes}
