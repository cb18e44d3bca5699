"""Says which tensor of a checkpoint a GGUF's tensor is, and how its rows are ordered."""

import re
from collections.abc import Mapping
from dataclasses import replace

from specops.models.convert.checkpoint import MTP
from specops.models.convert.families.family import Family
from specops.models.convert.gguf.header import GgufTensor, GgufTensors

_LAYER = re.compile(r"blk\.(?P<index>0|[1-9]\d{0,4})\.(?P<rest>.+)")
_FUSED = re.compile(r"(?P<layer>blk\.\d+\.)attn_qkv(?P<kind>\.weight|\.bias)")
_BESIDE_TEXT = ("v.", "a.", "mm.")  # tensors for images or sound, in files of Ollama
_MTP = {  # tensors of an MTP block outside its layer, which comes after the model's own layers
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
}


def is_beside_text(name: str) -> bool:
    """Whether a tensor is for images or sound, and the language model does not read it."""
    return name.startswith(_BESIDE_TEXT)


def stored_name(family: type[Family], num_layers: int, name: str) -> str | None:
    """The name of a tensor in a checkpoint; None if the family has no such tensor.

    Args:
        family: of the model.
        num_layers: without an MTP block, which is one more.
        name: as the GGUF has it.
    """
    names, found = family.gguf_tensors(), _LAYER.fullmatch(name)
    if found is None:
        return None if name.startswith("blk") else _renamed(name, names)
    index, rest = int(found["index"]), found["rest"]
    stored = _renamed(f"blk.{rest}", names)
    if family.has_mtp and index == num_layers:
        if stored is not None:
            return f"{MTP}layers.0.{stored}"
        return MTP + (_renamed(rest, _MTP) or rest)  # whether it is known is seen later
    return stored and f"{names['blk']}.{index}.{stored}"


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    """A name with or without a kind."""
    part, _, kind = name.rpartition(".")
    if name in names or kind not in ("weight", "bias") or part not in names:
        return names.get(name)
    return f"{names[part]}.{kind}"


def parted(family: type[Family], tensors: GgufTensors) -> dict[str, GgufTensor]:
    """The tensors, each fused one of queries, keys and values as three.

    llama.cpp's converter fuses them on request, in architectures that have them apart, too.
    """
    found: dict[str, GgufTensor] = {}
    apart = "blk.attn_q" in family.gguf_tensors()
    for name, tensor in tensors.items():
        fused, (rows, *inputs) = _FUSED.fullmatch(name), tensor.shape
        output = tensors.get(f"{fused['layer']}attn_output.weight") if fused else None
        queries = output.shape[-1] * family.query_parts if output else 0
        keys = (rows - queries) // 2
        if not (fused and output and apart and keys > 0 and queries + 2 * keys == rows):
            found[name] = tensor
            continue
        offset = tensor.offset
        for part, count in (("q", queries), ("k", keys), ("v", keys)):
            called = f"{fused['layer']}attn_{part}{fused['kind']}"
            nbytes = tensor.nbytes // rows * count
            found[called] = replace(
                tensor, name=called, shape=(count, *inputs), offset=offset, nbytes=nbytes
            )
            offset += nbytes
    return found
