"""Quantizes a model with llama.cpp, as in the files that its users download.

It runs in the peers' environment: `python -m bench.peers.llama_model GGUF FOLDER TYPE...` writes
FOLDER/TYPE.gguf. llama.cpp chooses which tensors get more bits than the type's name says.
"""

import sys
from pathlib import Path

import llama_cpp

_THREADS = 2


def quantize(source: Path, destination: Path, kind: str) -> None:
    """Write the GGUF `source` to `destination` in type `kind`, such as Q4_K_M."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread = _THREADS
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(destination).encode(), options
    )
    if failed:
        raise RuntimeError(f"llama.cpp cannot quantize {source} to {kind}")


if __name__ == "__main__":
    for named in sys.argv[3:]:
        quantize(Path(sys.argv[1]), Path(sys.argv[2]) / f"{named}.gguf", named)
