"""How a graph's nodes hang together, and how they are exchanged."""

from __future__ import annotations

from collections.abc import Iterable

import onnx


class Wiring:
    """Which nodes make and read the tensors of a graph, as it is now.

    Attributes:
        makers: the node that makes a tensor.
        readers: the nodes that read it, one for each of their inputs that it is.
        outputs: the tensors that the graph gives.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.makers = {name: node for node in graph.node for name in node.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        self.outputs = {item.name for item in graph.output}
        for node in graph.node:
            for name in filter(None, node.input):
                self.readers.setdefault(name, []).append(node)

    def only_read_by(self, name: str, nodes: Iterable[onnx.NodeProto]) -> bool:
        """Whether no other node reads a tensor, and it is no output of the graph."""
        readers = {node.output[0] for node in self.readers.get(name, ())}
        return name not in self.outputs and readers <= {node.output[0] for node in nodes}


def set_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Make these, which may be the graph's own, its nodes."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
