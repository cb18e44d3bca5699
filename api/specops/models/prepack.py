"""Write a graph with its weights laid out as this machine's kernels want them.

Ordinarily each start reorders the weights into anonymous memory. Here they lie in a file in the
order of `specops.kernels`, which its operators use as they are: mapped into the page cache, where
the system may drop and reread them under a memory cap.

Products that ONNX Runtime computes, where there are no such kernels or a node asks for something
else, keep what it reordered, which it can save and map likewise. One thing is mended on the way
(onnxruntime 1.31): packed weights hold places rounded up to 64 bytes, but are saved at any offset,
and those that were not saved at a multiple of 64 come back as garbage. Here each starts on a page.

The result is compared with the original before anyone can use it, to the bit if the kernels are
the same. Runs in a process of its own, since it takes the memory of an ordinary load:
`python -m specops.models.prepack GRAPH PREPACKED_GRAPH [--int8-prefill] [--tiles]`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import onnxruntime as ort

from specops.models.int8_prefill import int8_prefill
from specops.models.tensors import fill_page
from specops.models.tiles import write_tiles
from specops.models.weight_cache import USED
from specops.session import ModelLoadError, load, plain_options

_EXTERNAL_BYTES = 1024  # smaller weights stay in the graph's own file
_PIECE = 16 << 20
_PACKED = "prepacked_"
# 8 bits a token moved the demo pair's logits by 1 to 2 % of their spread, activations with large
# outliers move them by far more: such a model's prompts are read with the weights it has.
_LARGEST_DEVIATION = 0.1
# Other kernels round other sums, now and then to another one of the 8 bits that activations have.
_KERNELS_DEVIATION = 0.05


def prepack(graph: Path, destination: Path, *, tiles: bool = False) -> None:
    """Write the prepacked form of a graph.

    Args:
        graph: the graph; its weights lie beside it.
        destination: the new graph; its weights are written beside it.
        tiles: for `specops.kernels`, whatever they can compute.

    Raises:
        ModelLoadError: ONNX Runtime refuses the graph, or the copy does not compute the same.
    """
    saved = destination.with_name("saved.onnx")
    original = _save(graph, saved)
    tiled = _rewrite(saved, destination, tiles=tiles)
    for path in saved.parent.glob(f"{saved.name}*"):
        path.unlink()
    options = plain_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    found, expected = _logits(load(destination, options)), _logits(original)
    same = np.array_equal(found, expected)
    if not (same or (tiled and _deviation(found, expected) <= _KERNELS_DEVIATION)):
        raise ModelLoadError(f"{graph} does not compute the same after it was prepacked")


def prepack_int8_prefill(graph: Path, destination: Path, *, tiles: bool = False) -> None:
    """Write the prepacked form of a graph's 8-bit form, see `int8_prefill`.

    Args:
        graph: the graph; its weights lie beside it.
        destination: the new graph; its weights are written beside it.
        tiles: see `prepack`; of the products that are not drawn in 8 bits.

    Raises:
        ModelLoadError: see `prepack`; or there is nothing to draw in 8 bits, or the logits are
            too far from the graph's own.
    """
    drawn = destination.with_name("int8.onnx")
    if not int8_prefill(graph, drawn):
        raise ModelLoadError(f"{graph} has no layer that could be computed in 8 bits")
    prepack(drawn, destination, tiles=tiles)
    for path in drawn.parent.glob(f"{drawn.name}*"):
        path.unlink()
    expected, found = (_logits(load(path, plain_options())) for path in (graph, destination))
    deviation = _deviation(found, expected)
    if not deviation <= _LARGEST_DEVIATION:
        raise ModelLoadError(
            f"{graph} in 8 bits moves its logits by {deviation:.0%} of their spread, more than "
            f"{_LARGEST_DEVIATION:.0%}"
        )


def _save(graph: Path, saved: Path) -> ort.InferenceSession:
    """Load a graph and have ONNX Runtime save what it made of it."""
    options = plain_options()
    options.optimized_model_filepath = str(saved)
    for key, value in {
        "session.optimized_model_external_initializers_file_name": f"{saved.name}.data",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(_EXTERNAL_BYTES),
        "session.save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(key, value)
    return load(graph, options)


def _rewrite(saved: Path, destination: Path, *, tiles: bool) -> bool:
    """Copy the weights and their packed forms to places that are aligned, what is used first.

    Once there is a packed form the original of it is never read; ONNX Runtime's stay, because the
    format wants them. How many bytes come before the first of them goes into the file `used`.

    Returns:
        Whether `specops.kernels` compute any of the products.
    """
    model = onnx.load(saved, load_external_data=False)
    data = destination.with_name(f"{destination.name}.data")
    unused = []
    with saved.with_name(f"{saved.name}.data").open("rb") as source, data.open("wb") as target:
        written = write_tiles(model, saved.parent, data.name, target) if tiles else []
        for tensor in model.graph.initializer:
            entries = {entry.key: entry for entry in tensor.external_data}
            if not entries:
                continue
            entries["location"].value = data.name
            packed = [entry for key, entry in entries.items() if key.startswith(_PACKED)]
            for entry in packed:
                entry.value = _move_blobs(entry.value, source, target)
            if packed:
                unused.append(entries)
            else:
                _move(entries, source, target)
        used = target.tell()
        for entries in unused:
            _move(entries, source, target)
    model.graph.initializer.extend(written)
    onnx.save(model, destination)
    destination.with_name(USED).write_text(str(used), encoding="ascii")
    return bool(written)


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
            raise ModelLoadError("the saved weights end too early")
        target.write(piece)
        length -= len(piece)
    fill_page(target)
    return start


def _deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """How far logits are from others, in parts of their spread."""
    return float(np.std(found - expected) / np.std(expected))


def _logits(session: ort.InferenceSession) -> np.ndarray:
    """Logits of a short prompt without a past."""
    tokens = np.arange(1, 9, dtype=np.int64)[None]
    feed = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    for item in session.get_inputs():
        if item.name == "position_ids":
            feed[item.name] = np.arange(8, dtype=np.int64)[None]
        elif item.name not in feed:
            _, heads, _, size = item.shape
            dtype = np.float16 if item.type == "tensor(float16)" else np.float32
            feed[item.name] = np.zeros((1, heads, 0, size), dtype)
    (logits,) = session.run(["logits"], feed)
    if not np.isfinite(logits).all():
        raise ModelLoadError("the graph's logits are not finite")
    return np.asarray(logits)


if __name__ == "__main__":
    write = prepack_int8_prefill if "--int8-prefill" in sys.argv[3:] else prepack
    write(Path(sys.argv[1]), Path(sys.argv[2]), tiles="--tiles" in sys.argv[3:])
