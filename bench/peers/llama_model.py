"""Writes the random checkpoint as llama.cpp's users get theirs: GGUF, then llama.cpp's own Q4_0.

It runs in the peers' environment: `python -m bench.peers.llama_model CHECKPOINT MODEL_GGUF`. The
linear layers and the embedding become Q4_0. The output head becomes Q6_K: llama.cpp's quantizer
chooses that for Q4_0 models.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

_QUANTIZER_THREADS = 2


def write_gguf(checkpoint: Path, destination: Path) -> None:
    """Write a Llama checkpoint as GGUF: matrices in float16, norms in float32, no vocabulary."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(destination, "llama")
    _describe(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(checkpoint / "model.safetensors", framework="np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a dictionary
            tensor = tensors.get_tensor(name)
            if name.endswith("self_attn.q_proj.weight"):
                tensor = interleaved(tensor, config["num_attention_heads"])
            elif name.endswith("self_attn.k_proj.weight"):
                tensor = interleaved(tensor, config["num_key_value_heads"])
            dtype = np.float32 if tensor.ndim == 1 else np.float16
            called = names.get_name(name, try_suffixes=(".weight",))
            writer.add_tensor(called, np.ascontiguousarray(tensor, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("no_vocab")  # token ids go in, logits come out


def interleaved(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Reorder the rows of a query or key projection, [heads * head, hidden].

    llama.cpp rotates neighbouring pairs where transformers rotates halves.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def quantize(source: Path, destination: Path) -> None:
    """Let llama.cpp turn a float16 GGUF into Q4_0."""
    import llama_cpp  # noqa: PLC0415 - compiled, and not needed to write the file

    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread = _QUANTIZER_THREADS
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(destination).encode(), options
    )
    if failed:
        raise RuntimeError(f"llama.cpp cannot quantize {source}")


def main(checkpoint: Path, destination: Path) -> None:
    """Write the Q4_0 model."""
    whole = destination.with_suffix(".f16")
    try:
        write_gguf(checkpoint, whole)
        quantize(whole, destination)
    finally:
        whole.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
