"""Has llama.cpp's own quantizer write a model as its users download it.

It runs in the peers' environment: `python -m bench.peers.llama_model GGUF FOLDER TYPE...` writes
FOLDER/TYPE.gguf. Which tensors get more bits than the type's name says is llama.cpp's choice.
"""

import sys
from pathlib import Path

import llama_cpp

_THREADS = 2


def quantize(source: Path, destination: Path, kind: str) -> None:
    """Write `source` in another type, such as Q4_K_M."""
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
