"""Writes a graph as this machine runs it: rewritten, optimized, its weights in one mapped file.

The steps: `rewrite` for a flat batch and a KV cache in blocks, `write_tiles` for the products that
`specops.runtime.kernels` computes, then ONNX Runtime's optimizer for the rest. The weights lie in
a file in the order in which a pass reads them; tables that it reads a few rows of come after
them. The file is mapped into the page cache, where the system may drop and reread pages under a
memory cap.

Products that stay with ONNX Runtime keep ONNX Runtime's packed form of weights; it can save this
form and map it likewise. This module repairs one thing (onnxruntime 1.31): a packed
weight must start at a multiple of 64 bytes, but ONNX Runtime saves it at any offset, and then reads
back garbage. Here each weight starts on a page.

Packing takes memory, so this runs in a child process:
`python -m specops.models.graph.prepack GRAPH PREPACKED_GRAPH [--states LAYER …] [--mtp GRAPH]`. On
an error it writes one line to standard error.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper

from specops.models.contract import MAX_GUESSABLE, USED
from specops.models.errors import ModelError
from specops.models.graph.nodes import RefusedGraphError
from specops.models.graph.rewrite import is_fusion, rewrite
from specops.models.graph.tensors import append, fill_page, locate, values_of
from specops.models.graph.tiles import Written, named, write_tiles
from specops.runtime import kernels, layer_shapes
from specops.runtime.layer_shapes import LayerShape
from specops.runtime.session import ModelLoadError, load, plain_options

_EXTERNAL_BYTES = 1024  # smaller weights stay in the graph's own file
_PIECE = 16 << 20
_PACKED = "prepacked_"
_NUMBERS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Errors from missing attributes, wrong shapes, and weights that are cut short
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_LOOK_UPS = ("Gather", "GatherBlockQuantized")
_ROTARY = slice(6, 8), slice(10, 12)  # attention's inputs with tables of its rotation
_PRODUCTS = ("MatMul", "Gemm")  # the names of all operators that multiply contain one of these
_ADVICE = (
    "use another export of the model, or its checkpoint (config.json and safetensors), which is "
    "converted here"
)


def prepack(
    graph: Path, destination: Path, states: Sequence[int] = (), mtp: Path | None = None
) -> None:
    """Write the form of a graph that the engine runs.

    Args:
        graph: the graph; its weights are in the same folder.
        destination: the new graph; its weights are written to the same folder, and a file `used`
            with the number of bytes of them that a pass reads.
        states: layers whose inputs a draft head reads.
        mtp: the graph of the model's MTP block, in the same folder. It keeps its name, next to the
            new graph, shares that graph's weights and reads its last states.

    Raises:
        ModelError: the engine does not understand the graph, or its files are damaged.
        ModelLoadError: ONNX Runtime refuses the graph.
    """
    data = destination.with_name(f"{destination.name}.data")
    parts = [_Part(graph, destination, states, final=mtp is not None)]
    if mtp is not None:
        parts.append(_Part(mtp, destination.with_name(mtp.name), most_logits=MAX_GUESSABLE))
    written: Written = {}
    with data.open("wb") as target:
        for part in parts:
            part.write_tiles(data.name, target, written)
        for part in parts:
            part.optimize(data.name, target)
        used = target.tell()
        for part in parts:
            part.finish(data.name, target, written)
    destination.with_name(USED).write_text(str(used), encoding="ascii")


class _Part:
    """One of the graphs, on its way to its file."""

    def __init__(
        self,
        graph: Path,
        destination: Path,
        states: Sequence[int] = (),
        *,
        final: bool = False,
        most_logits: int | None = None,
    ) -> None:
        """See `prepack`, `rewrite` and `write_tiles`."""
        self.graph, self.destination = graph, destination
        try:
            self.model = onnx.load(graph, load_external_data=False)
        except OSError:
            raise
        except Exception as error:  # protobuf's own, which has no types
            raise ModelError(f"{graph} is not an ONNX graph: copy or download it again") from error
        self._states, self._final, self._most_logits = states, final, most_logits
        self._saved = destination.with_name(f"{destination.name}.saved")
        self._unused: list[dict[str, onnx.StringStringEntryProto]] = []

    def write_tiles(self, location: str, target: BinaryIO, written: Written) -> None:
        """Rewrite the graph, and write its products' weights."""
        try:
            locate(self.model.graph, self.graph.parent)
            if is_fusion(self.model):
                self._layers = None
            else:
                self._layers = rewrite(self.model, self._states, final=self._final)
            self._check_finite()
            self._tiles, self._tables = write_tiles(
                *(self.model, self.graph.parent, location, target, written),
                most_logits=self._most_logits,
            )
        except RefusedGraphError as refusal:
            raise ModelError(f"{self.graph} cannot be run: {refusal}; {_ADVICE}") from refusal
        except _DAMAGED as error:
            raise ModelError(f"{self.graph} is damaged ({error!r}); {_ADVICE}") from error

    def _check_finite(self) -> None:
        """Raise ModelError if a weight is NaN or infinite; a GGUF's were checked before."""
        for tensor in self.model.graph.initializer:
            if tensor.data_type in _NUMBERS and math.prod(tensor.dims) > 1:
                values = values_of(tensor, self.graph.parent)
                for start in range(0, len(values), step := max(1, _PIECE // values[0].nbytes)):
                    if not np.isfinite(values[start : start + step]).all():
                        raise ModelError(
                            f"{self.graph}: the weight {tensor.name} contains NaN or infinity: "
                            "download the model again"
                        )

    def optimize(self, location: str, target: BinaryIO) -> None:
        """Let ONNX Runtime optimize the rest, and write the weights that it reads."""
        weights = [*self._tiles, *self._tables]
        self.model = _optimized(self.model, weights, self.graph.parent, self._saved)
        self._unused = _move_weights(self.model, self._saved, location, target)

    def finish(self, location: str, target: BinaryIO, written: Written) -> None:
        """Write the weights that a pass does not read, and the graph."""
        if self._unused:
            with _weights_of(self._saved).open("rb") as weights:
                for entries in self._unused:
                    _move(entries, weights, target)
        for table in self._tables:
            key = tuple((entry.key, entry.value) for entry in table.external_data)
            if key not in written:
                rows = values_of(table, self.graph.parent)
                written[key] = append(table.name, [rows], location, target, rows.shape)
            self._tiles.append(named(written[key], table.name))
        self.model.graph.initializer.extend(self._tiles)
        _describe(self.model, self._layers)
        onnx.save(self.model, self.destination)
        for path in self._saved.parent.glob(f"{self._saved.name}*"):
            path.unlink()


def _optimized(
    model: onnx.ModelProto, tiles: Sequence[TensorProto], folder: Path, saved: Path
) -> onnx.ModelProto:
    """Return the graph as ONNX Runtime optimizes it; its weights and packed forms go to `saved`.

    Meanwhile the tiles are inputs, so that ONNX Runtime does not copy them.
    """
    for tensor in tiles:
        item = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.input.append(item)
    options = plain_options()
    options.optimized_model_filepath = str(saved)
    for key, value in {
        "session.model_external_initializers_file_folder_path": str(folder),
        "session.optimized_model_external_initializers_file_name": _weights_of(saved).name,
        "session.optimized_model_external_initializers_min_size_in_bytes": str(_EXTERNAL_BYTES),
        "session.save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(key, value)
    load(model.SerializeToString(), options)
    optimized = onnx.load(saved, load_external_data=False)
    names = {tensor.name for tensor in tiles}
    for item in [item for item in optimized.graph.input if item.name in names]:
        optimized.graph.input.remove(item)
    return optimized


def _weights_of(saved: Path) -> Path:
    return saved.with_name(f"{saved.name}.data")


def _move_weights(
    model: onnx.ModelProto, saved: Path, location: str, target: BinaryIO
) -> list[dict[str, onnx.StringStringEntryProto]]:
    """Copy weights and their packed forms to page starts, in the order of their use.

    A pass does not read a weight that has a packed form, and of a table only the rows of its
    tokens. Tables and such originals go last; ONNX Runtime's format wants the latter in the file.

    Returns:
        The places of those that go last.
    """
    tables = _tables(model.graph)
    unused = list[dict[str, onnx.StringStringEntryProto]]()
    outside = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if not outside:
        return unused
    with _weights_of(saved).open("rb") as weights:
        for tensor in outside:
            entries = {entry.key: entry for entry in tensor.external_data}
            entries["location"].value = location
            packed = [entry for key, entry in entries.items() if key.startswith(_PACKED)]
            for entry in packed:
                # key|offset;length;flag, and for each further blob another ;offset;length;flag
                key, _, blobs = entry.value.partition("|")
                fields = blobs.split(";")
                for at in range(0, len(fields) - 2, 3):
                    fields[at] = _copy(weights, fields[at], fields[at + 1], target)
                entry.value = f"{key}|{';'.join(fields)}"
            if packed or tensor.name in tables:
                unused.append(entries)
            else:
                _move(entries, weights, target)
    return unused


def _tables(graph: onnx.GraphProto) -> set[str]:
    """Return the weights that tokens and positions are looked up in."""
    found: set[str] = set()
    for node in graph.node:
        if node.op_type in _LOOK_UPS:
            found.update(node.input)
        elif (node.domain, node.op_type) == (kernels.DOMAIN, kernels.ATTENTION):
            found.update(name for places in _ROTARY for name in node.input[places])
    return found


def _move(
    entries: dict[str, onnx.StringStringEntryProto], source: BinaryIO, target: BinaryIO
) -> None:
    offset, length = entries["offset"], entries["length"]
    offset.value = _copy(source, offset.value, length.value, target)


def _copy(source: BinaryIO, offset: str, length: str, target: BinaryIO) -> str:
    """Append bytes of one file to another and fill the last page; return the new offset."""
    start, left = target.tell(), int(length)
    source.seek(int(offset))
    while left:
        piece = source.read(min(left, _PIECE))
        if not piece:
            raise ModelError(f"{source.name} is truncated")
        target.write(piece)
        left -= len(piece)
    fill_page(target)
    return str(start)


def _describe(model: onnx.ModelProto, layers: Sequence[LayerShape] | None) -> None:
    """Write the engine's metadata into the graph."""
    foreign = [
        node.name or node.output[0]
        for node in model.graph.node
        if node.domain != kernels.DOMAIN and any(part in node.op_type for part in _PRODUCTS)
    ]
    properties = {"specops.foreign_products": ",".join(foreign)}
    properties |= layer_shapes.dump(layers) if layers else {}
    helper.set_model_props(model, properties)


def main(arguments: list[str]) -> int:
    """Prepack a graph; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specops.models.graph.prepack")
    parser.add_argument("graph", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--states", type=int, nargs="*", default=[])
    parser.add_argument("--mtp", type=Path)
    given = parser.parse_args(arguments)
    graph, destination = given.graph, given.destination
    try:
        prepack(graph, destination, given.states, given.mtp)
    except (ModelError, ModelLoadError) as error:
        problem = str(error)
    except MemoryError:
        problem = f"ran out of memory while preparing {graph}: raise the limit or use int4 weights"
    except OSError as error:
        problem = (
            f"{error.filename or destination.parent} cannot be written ({error.strerror}): "
            "set SPECOPS_CACHE_DIR to a folder with room for the weights"
        )
    else:
        return 0
    print(" ".join(problem.split()), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
