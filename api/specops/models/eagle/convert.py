"""Converts an EAGLE-3 checkpoint into the graphs that run it with its target.

`python -m specops.models.eagle.convert HEAD TARGET_GRAPH DEST --quant int8-64 --context N` runs in
a separate process. What the checkpoint leaves out, its embedding or its output rows, is taken from
the target's graph.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import onnx

from specops.models.convert.checkpoint import HEAD, Matrix
from specops.models.convert.quantization import Quantization
from specops.models.convert.weights import WeightStore
from specops.models.eagle.checkpoint import HeadCheckpoint
from specops.models.eagle.layer import EagleLayer, Target
from specops.models.eagle.target_rows import Embedding, output_blocks, output_rows
from specops.models.errors import ModelError
from specops.models.graph.nodes import mixers
from specops.models.head_folder import FUSION_GRAPH, HEAD_GRAPH, EagleFolder
from specops.runtime.session import ModelLoadError
from specops.system.checksums import write_checksums
from specops.system.folders import atomic_folder


def convert(
    source: Path,
    graph: Path,
    destination: Path,
    *,
    quantization: Quantization,
    context: int,
    weights: Sequence[Path] = (),
) -> EagleFolder:
    """Write a head's graphs and its manifest.

    Args:
        source: the head's checkpoint.
        graph: the exported graph of its target.
        destination: the folder to write.
        quantization: of the head's weights.
        context: the target's, in tokens.
        weights: state dicts of torch, where the checkpoint has no safetensors.

    Raises:
        ExportError, ModelError, ModelLoadError: the head cannot run with this target; the message
            says why.
    """
    embedding = Embedding(graph)
    layers = len(mixers(onnx.load(graph, load_external_data=False).graph.node))
    target = Target(*embedding.shape, layers, context)
    checkpoint = HeadCheckpoint(source, weights)
    layer = EagleLayer(checkpoint, target)
    tables = {"embed_tokens.weight": Matrix("the target's embedding", (embedding,))}
    if HEAD in layer.shared:
        blocks = None if quantization.bits == 32 else output_blocks(graph, layer.tokens)
        rows = output_rows(graph, layer.tokens, target.hidden_size) if blocks is None else blocks
        tables[HEAD] = Matrix("the target's output rows", (rows,))
    with atomic_folder(destination) as folder:
        with _store(folder, HEAD_GRAPH) as store:
            model = layer.head_graph(quantization, store, tables)
        onnx.save(model, folder / HEAD_GRAPH)
        if layer.fuses:
            with _store(folder, FUSION_GRAPH) as store:
                model = layer.fusion_graph(quantization, store)
            onnx.save(model, folder / FUSION_GRAPH)
        made = EagleFolder(folder, layers=layer.layers_read, tokens=layer.tokens)
        made.write()
        write_checksums(folder)
    return made


def _store(folder: Path, graph: str) -> WeightStore:
    return WeightStore(folder / f"{graph}.data", lambda nbytes: None)


def main(arguments: list[str] | None = None) -> int:
    """Convert; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m specops.models.eagle.convert", description=__doc__
    )
    for name in ("head", "target", "destination"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--quant", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--weights", type=Path, action="append", default=[])
    given = parser.parse_args(arguments)
    try:
        convert(
            given.head,
            given.target,
            given.destination,
            quantization=Quantization.parse(given.quant),
            context=given.context,
            weights=given.weights,
        )
    except (ModelError, ModelLoadError, ValueError, OSError) as error:
        print(f"specops.models.eagle.convert: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
