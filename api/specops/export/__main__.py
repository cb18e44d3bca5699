"""`python -m specops.export SOURCE DEST --quant int4-128`: an export from the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specops.export import ExportError, Quantization, export_checkpoint


def _percent(done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{100 * done // total:3d} %", end=end, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Exports and prints where to; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specops.export", description=__doc__)
    parser.add_argument("source", type=Path, help="Hugging Face checkpoint folder")
    parser.add_argument("destination", type=Path, help="folder to write the ONNX model to")
    parser.add_argument("--quant", default="int4", help="fp32, int8[-BLOCK] or int4[-BLOCK]")
    options = parser.parse_args(arguments)
    try:
        quantization = Quantization.parse(options.quant)
        model = export_checkpoint(
            options.source, options.destination, quantization=quantization, progress=_percent
        )
    except (ExportError, ValueError) as error:
        print(f"specops.export: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in model.path.iterdir())
    print(f"{model.path}: {model.family} {quantization.name}, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
