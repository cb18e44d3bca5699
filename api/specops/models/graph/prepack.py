"""Writes a graph as this machine runs it: rewritten, optimized, its weights in one mapped file.

The steps: `rewrite` for a flat batch and a KV cache in blocks, `write_tiles` for the products that
`specops.runtime.kernels` computes, then ONNX Runtime's optimizer for the rest. The weights lie in
a file in the order in which a pass reads them; tables of which it reads a few rows come behind
them. The file is mapped into the page cache, where the system may drop and reread pages under a
memory cap.

Products that stay with ONNX Runtime keep the form into which ONNX Runtime packs weights; it can
save this form and map it likewise. This module repairs one thing (onnxruntime 1.31): a packed
weight must start at a multiple of 64 bytes, but ONNX Runtime saves it at any offset, and then reads
back garbage. Here each weight starts on a page.

Packing takes memory, so this runs in a process of its own:
`python -m specops.models.graph.prepack GRAPH PREPACKED_GRAPH [LAYER …]`. On an error it writes one
line to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import onnx
from onnx import TensorProto, helper

from specops.models.folder import ModelError
from specops.models.graph.nodes import RefusedGraphError
from specops.models.graph.rewrite import is_head, rewrite
from specops.models.graph.tensors import append, check_places, fill_page, values_of
from specops.models.graph.tiles import write_tiles
from specops.models.graph.weight_cache import USED
from specops.runtime import kernels, layer_shapes
from specops.runtime.layer_shapes import LayerShape
from specops.runtime.session import ModelLoadError, load, plain_options

_EXTERNAL_BYTES = 1024  # smaller weights stay in the graph's own file
_PIECE = 16 << 20
_PACKED = "prepacked_"
# Errors from missing attributes, shapes that do not fit, and weights that are cut short
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_PRODUCTS = ("MatMul", "Gemm")  # the names of all operators that multiply contain one of these
_ADVICE = (
    "use another export of the model, or its checkpoint (config.json and safetensors), which is "
    "converted here"
)


def prepack(graph: Path, destination: Path, states: Sequence[int] = ()) -> None:
    """Write the form of a graph that the engine runs.

    Args:
        graph: the graph; its weights lie beside it.
        destination: the new graph; its weights are written beside it, and a file `used` with the
            number of bytes of them that a pass reads.
        states: layers whose inputs a draft head reads.

    Raises:
        ModelError: the engine does not understand the graph, or its files are damaged.
        ModelLoadError: ONNX Runtime refuses the graph.
    """
    try:
        model = onnx.load(graph, load_external_data=False)
    except OSError:
        raise
    except Exception as error:  # protobuf's own, which has no types
        raise ModelError(f"{graph} is not an ONNX graph: copy or download it again") from error
    data = destination.with_name(f"{destination.name}.data")
    saved = destination.with_name("saved")
    with data.open("wb") as target:
        try:
            check_places(model.graph, graph.parent)
            layers = None if is_head(model) else rewrite(model, states)
            tiles, tables = write_tiles(model, graph.parent, data.name, target)
        except RefusedGraphError as refusal:
            raise ModelError(f"{graph} cannot be run: {refusal}; {_ADVICE}") from refusal
        except _DAMAGED as error:
            raise ModelError(f"{graph} is damaged ({error!r}); {_ADVICE}") from error
        finished = _optimized(model, [*tiles, *tables], graph.parent, saved)
        used = _move_weights(finished, saved.with_name(f"{saved.name}.data"), data.name, target)
        for table in tables:
            rows = values_of(table, graph.parent)
            tiles.append(append(table.name, [rows], data.name, target, rows.shape))
    finished.graph.initializer.extend(tiles)
    _describe(finished, layers)
    onnx.save(finished, destination)
    destination.with_name(USED).write_text(str(used), encoding="ascii")
    for path in saved.parent.glob(f"{saved.name}*"):
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
        "session.optimized_model_external_initializers_file_name": f"{saved.name}.data",
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


def _move_weights(model: onnx.ModelProto, source: Path, location: str, target: BinaryIO) -> int:
    """Copy weights and their packed forms to page starts, in the order of their use.

    A pass does not read a weight that has a packed form. Such originals go last; ONNX Runtime's
    format wants them in the file.

    Returns:
        The number of bytes before the first original that a pass does not read.
    """
    outside = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if not outside:
        return target.tell()
    unused = []
    with source.open("rb") as weights:
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
            if packed:
                unused.append(entries)
            else:
                _move(entries, weights, target)
        used = target.tell()
        for entries in unused:
            _move(entries, weights, target)
    return used


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
    """Write into the graph what the engine must know of it."""
    foreign = [
        node.name or node.output[0]
        for node in model.graph.node
        if node.domain != kernels.DOMAIN and any(part in node.op_type for part in _PRODUCTS)
    ]
    properties = {"specops.foreign_products": ",".join(foreign)}
    properties |= layer_shapes.dump(layers) if layers else {}
    helper.set_model_props(model, properties)


def main(arguments: list[str]) -> int:
    """Prepack `arguments[0]` as `arguments[1]`; return the exit status.

    All further arguments are layers whose inputs a draft head reads.
    """
    graph, destination = map(Path, arguments[:2])
    try:
        prepack(graph, destination, [int(layer) for layer in arguments[2:]])
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
