"""`python -m specops.models.convert SOURCE DEST --quant int4-128`: converts a checkpoint.

A GGUF keeps its own weights: for it, `--quant` is `gguf` or absent.
"""

import argparse
import sys
from pathlib import Path

from specops.models.convert import export_checkpoint, quantization_for
from specops.models.errors import ModelError


class _Percents:
    """Prints each new percentage: in place on a terminal, otherwise as a line for programs."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // total
        if percent == self._last:
            return
        self._last = percent
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{percent:3d} %", end=end, file=sys.stderr)
        else:
            print(f"{percent} %", flush=True)


def convert(arguments: list[str] | None = None) -> None:
    """Exports and prints the destination.

    Raises:
        ModelError, ValueError, OSError: see `export_checkpoint`; an unknown quantization.
    """
    parser = argparse.ArgumentParser(prog="python -m specops.models.convert", description=__doc__)
    parser.add_argument("source", type=Path, help="Hugging Face checkpoint folder, or GGUF")
    parser.add_argument("destination", type=Path, help="folder to write the ONNX model to")
    parser.add_argument(
        "--quant", help="fp32, int8[-BLOCK], int4[-BLOCK][-mixed][-rtn]; int4, or gguf for a GGUF"
    )
    parser.add_argument(
        "--weights",
        type=Path,
        action="append",
        help="folder of the safetensors if it is another one, or a state dict, once per shard",
    )
    parser.add_argument(
        "--in-place", action="store_true", help="leave in the checkpoint what needs no conversion"
    )
    parser.add_argument("--source-digest", default="", help="digest of the checkpoint")
    options = parser.parse_args(arguments)
    model = export_checkpoint(
        options.source,
        options.destination,
        quantization=quantization_for(options.source, options.quant),
        weights=options.weights or (),
        progress=_Percents(),
        source_digest=options.source_digest,
        in_place=options.in_place,
    )
    size = sum(file.stat().st_size for file in model.path.iterdir())
    print(f"{model.path}: {model.family} {model.quantization.name}, {size / 1e6:.1f} MB")


def main(arguments: list[str] | None = None) -> int:
    """Exports; returns the exit status."""
    try:
        convert(arguments)
    except (ModelError, ValueError, OSError) as error:  # OSError: most often a full disk
        print(f"specops.models.convert: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
