"""Reads a folder that the engine can load: a graph, a tokenizer and a file that describes them.

There are two kinds: our own exports, described by `specops.json`, and models published for
onnxruntime-genai, described by `genai_config.json`. Their graphs follow the same contract.
"""

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from specops.models.contract import MANIFEST
from specops.models.errors import ModelError
from specops.models.paths import path_inside

log = logging.getLogger(__name__)

GENAI_CONFIG = "genai_config.json"
TOKENIZER_ADVICE = (
    "put the model's tokenizer.json (or vocab.json and merges.txt, or tokenizer.model) into its "
    "folder, and set SPECOPS_TARGET or SPECOPS_DRAFT to that"
)
ADAPTER = "adapter_config.json"
ADAPTER_ADVICE = (
    "is an adapter (LoRA), not a model: merge it into its base model, for example with PEFT's "
    "merge_and_unload, and give SPECOPS_TARGET the folder of the merged model"
)
MEMORY_ADVICE = "most likely because memory ran out: raise the memory limit, or use smaller weights"
SHORTER_ADVICE = (
    "most likely because a file became shorter while it was read, or its disk fails: copy it again"
)
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_LARGEST = (1 << 31) - 1  # no size and no token id of a model is larger
_MAX_PARAMETERS = 1 << 50
_WEIGHTS = re.compile(r"int4|int8|fp16|fp32|bf16")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """An exported model: a graph, a tokenizer, and their description.

    `parameters`, `hidden_size` and `num_heads` are 0 if they are not known, `source_digest` is
    empty then: the digest of the checkpoint that was exported. `mtp` is the graph of the model's
    own MTP block, if it has one. `template_folder` is a GGUF's folder: a person may put a chat
    template there.
    """

    path: Path
    name: str
    graph: Path
    quant: str
    vocab_size: int
    context_length: int
    parameters: int
    bos_token: int | None
    end_tokens: frozenset[int]
    hidden_size: int = 0
    num_heads: int = 0
    source_digest: str = ""
    mtp: Path | None = None
    template_folder: Path | None = field(default=None, compare=False)

    @classmethod
    def read(cls, path: Path, name: str) -> Self:
        """Read the manifest of an export.

        Raises:
            ModelError: the manifest is missing or lacks a field.
        """
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            return cls(
                path=path,
                name=name,
                graph=path_inside(path, manifest["onnx_file"]),
                quant=manifest["quantization"]["name"],
                vocab_size=_size(manifest["vocab_size"]),
                context_length=_size(manifest["context_length"]),
                parameters=_size(manifest["num_parameters"], _MAX_PARAMETERS),
                bos_token=_token(manifest["bos_token_id"]),
                end_tokens=frozenset(map(_size, manifest["eos_token_ids"])),
                hidden_size=_size(manifest.get("hidden_size", 0)),  # older exports lack it
                num_heads=_size(manifest.get("num_heads", 0)),
                source_digest=str(manifest.get("source_digest", "")),
                mtp=path_inside(path, block) if (block := manifest.get("mtp_file")) else None,
            )
        except _DAMAGED as error:
            raise ModelError(
                f"{path / MANIFEST} cannot be used ({error!r}): export the model again"
            ) from error

    @classmethod
    def read_genai(cls, path: Path, name: str) -> Self:
        """Read the description of a model published for onnxruntime-genai.

        Raises:
            ModelError: the description, the graph or the tokenizer is missing, or the description
                lacks a field.
        """
        try:
            model = json.loads((path / GENAI_CONFIG).read_text(encoding="utf-8"))["model"]
            graph = path_inside(path, model["decoder"]["filename"])
            weights, size = _WEIGHTS.search(graph.name), _size(model["vocab_size"])
            eos, bos = model["eos_token_id"], model.get("bos_token_id")
            folder = cls(
                path=path,
                name=name,
                graph=graph,
                quant=weights.group() if weights else "onnx",
                vocab_size=size,
                context_length=_size(model["context_length"]),
                parameters=0,
                bos_token=next(iter(_tokens([bos], size, path)), None),
                end_tokens=_tokens(eos if isinstance(eos, list) else [eos], size, path),
                hidden_size=_size(model["decoder"].get("hidden_size", 0)),
                num_heads=_size(model["decoder"].get("num_attention_heads", 0)),
            )
        except _DAMAGED as error:
            raise ModelError(
                f"{path / GENAI_CONFIG} cannot be used ({error!r}): it must describe a decoder "
                "as onnxruntime-genai's model builder does"
            ) from error
        for needed in (folder.graph, path / "tokenizer.json"):
            if not needed.is_file():
                raise ModelError(f"{path} lacks {needed.name}: copy or download the whole folder")
        return folder


def _size(value: Any, most: int = _LARGEST) -> int:
    """Return a value from a description, if it can be a size or a token id."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:100]} is not a size")
    return value


def _tokens(ids: list[Any], vocab_size: int, path: Path) -> frozenset[int]:
    """Return those ids that are tokens; a model without a token of some role may say -1."""
    present = [token for token in ids if token is not None]
    if not all(type(token) is int for token in present):
        raise ValueError(f"{str(ids)[:100]} are not token ids")
    for token in present:
        if not 0 <= token < vocab_size:
            log.warning("%s: %d is ignored: the vocabulary has %d tokens", path, token, vocab_size)
    return frozenset(token for token in present if 0 <= token < vocab_size)


def _token(value: Any) -> int | None:
    return None if value is None else _size(value)
