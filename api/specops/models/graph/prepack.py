"""Writes a graph as this machine runs it: rewritten, optimized, its weights where they are mapped.

The steps: `rewrite` for batches and blocks of cache, `write_tiles` for the products that
`specops.runtime.kernels` compute, then what ONNX Runtime's optimizer makes of the rest. The weights
lie in a file in the order in which they are used: mapped into the page cache, where the system may
drop and reread them under a memory cap.

Products that stay ONNX Runtime's keep the form into which it reorders weights, which it can save
and map likewise. One thing is mended on the way (onnxruntime 1.31): packed weights hold places
rounded up to 64 bytes, but are saved at any offset, and those that were not saved at a multiple of
64 come back as garbage. Here each starts on a page.

Runs in a process of its own, since ONNX Runtime's packing takes memory:
`python -m specops.models.graph.prepack GRAPH PREPACKED_GRAPH`. What is wrong with a graph is said
in a line on standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import onnx
from onnx import TensorProto, helper

from specops.models.folder import ModelError
from specops.models.graph.rewrite import AttentionShape, is_head, rewrite
from specops.models.graph.tensors import check_places, fill_page
from specops.models.graph.tiles import write_tiles
from specops.models.graph.tokenwise import RefusedGraphError
from specops.models.graph.weight_cache import USED
from specops.runtime import kernels
from specops.runtime.session import ModelLoadError, load, plain_options

_EXTERNAL_BYTES = 1024  # smaller weights stay in the graph's own file
_PIECE = 16 << 20
_PACKED = "prepacked_"
# What comes of attributes that are missing, shapes that do not fit, weights that are cut short.
_DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_PRODUCTS = ("MatMul", "Gemm")  # parts of the names of all operators that multiply
_ADVICE = (
    "take another export of the model, or its checkpoint (config.json and safetensors), which is "
    "converted here"
)


def prepack(graph: Path, destination: Path) -> None:
    """Write the form of a graph that the engine runs.

    Args:
        graph: the graph; its weights lie beside it.
        destination: the new graph; its weights are written beside it, and a file `used`.

    Raises:
        ModelError: something in the graph is not understood, or its files are not as they must be.
        ModelLoadError: ONNX Runtime refuses the graph.
    """
    try:
        model = onnx.load(graph, load_external_data=False)
    except OSError:
        raise
    except Exception as error:  # protobuf's own, which has no types
        raise ModelError(f"{graph} is no ONNX graph: copy or download it again") from error
    data, saved = (
        destination.with_name(f"{name}") for name in (f"{destination.name}.data", "saved")
    )
    with data.open("wb") as target:
        try:
            check_places(model.graph, graph.parent)
            shape = None if is_head(model) else rewrite(model)
            tiles = write_tiles(model, graph.parent, data.name, target)
        except RefusedGraphError as refusal:
            raise ModelError(f"{graph} cannot be run: {refusal}; {_ADVICE}") from refusal
        except _DAMAGED as error:
            raise ModelError(f"{graph} is damaged ({error!r}); {_ADVICE}") from error
        finished = _optimized(model, tiles, graph.parent, saved)
        used = _move_weights(finished, saved.with_name(f"{saved.name}.data"), data.name, target)
    finished.graph.initializer.extend(tiles)
    _describe(finished, shape)
    onnx.save(finished, destination)
    destination.with_name(USED).write_text(str(used), encoding="ascii")
    for path in saved.parent.glob(f"{saved.name}*"):
        path.unlink()


def _optimized(
    model: onnx.ModelProto, tiles: Sequence[TensorProto], folder: Path, saved: Path
) -> onnx.ModelProto:
    """What ONNX Runtime makes of a graph; its weights and their packed forms go beside `saved`.

    Tiles are inputs meanwhile: what ONNX Runtime does not see it does not copy.
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
    """Copy weights and their packed forms to places that are aligned, what is used first.

    Once there is a packed form the original of it is never read; ONNX Runtime's stay, because the
    format wants them.

    Returns:
        How many bytes come before the first of those that are not read.
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
                entry.value = _move_blobs(entry.value, weights, target)
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
    """Copy a weight as the graph has it."""
    offset, length = (int(entries[key].value) for key in ("offset", "length"))
    entries["offset"].value = str(_copy(source, offset, length, target))


def _move_blobs(text: str, source: BinaryIO, target: BinaryIO) -> str:
    """Copy the blobs of one packed weight.

    Args:
        text: `key|offset;length;flag`, more blobs appended with another `;offset;length;flag`.
        source: the saved weights.
        target: the new weights.

    Returns:
        The same with the new offsets.
    """
    key, _, blobs = text.partition("|")
    fields = blobs.split(";")
    for index in range(0, len(fields) - 2, 3):
        fields[index] = str(_copy(source, int(fields[index]), int(fields[index + 1]), target))
    return f"{key}|{';'.join(fields)}"


def _copy(source: BinaryIO, offset: int, length: int, target: BinaryIO) -> int:
    """Append bytes of one file to another, from the next page on; return where they start."""
    start = target.tell()
    source.seek(offset)
    while length:
        piece = source.read(min(length, _PIECE))
        if not piece:
            raise ModelError(f"{source.name} ends too early")
        target.write(piece)
        length -= len(piece)
    fill_page(target)
    return start


def _describe(model: onnx.ModelProto, shape: AttentionShape | None) -> None:
    """Say in the graph what the engine needs to know of it."""
    foreign = [
        node.name or node.output[0]
        for node in model.graph.node
        if node.domain != kernels.DOMAIN and any(part in node.op_type for part in _PRODUCTS)
    ]
    properties = {"specops.foreign_products": ",".join(foreign)}
    if shape is not None:
        properties["specops.layers"] = str(shape.layers)
        properties["specops.kv_heads"] = str(shape.kv_heads)
        properties["specops.head_size"] = str(shape.head_size)
    helper.set_model_props(model, properties)


def main(arguments: list[str]) -> int:
    """Prepack `arguments[0]` as `arguments[1]`; returns the exit status."""
    graph, destination = map(Path, arguments)
    try:
        prepack(graph, destination)
    except (ModelError, ModelLoadError) as error:
        problem = str(error)
    except MemoryError:
        problem = f"memory ran out while {graph} was laid out: raise the limit or take int4 weights"
    except OSError as error:
        problem = (
            f"{error.filename or destination.parent} cannot be written ({error.strerror}): "
            "SPECOPS_CACHE_DIR takes a folder with room for the weights"
        )
    else:
        return 0
    print(" ".join(problem.split()), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
