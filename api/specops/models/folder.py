"""A folder that the engine can load: a graph, a tokenizer, and what is said about them.

Two kinds are known: our own exports, described by `specops.json`, and models published for
onnxruntime-genai, described by `genai_config.json`; their graphs keep the same contract.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "specops.json"
GENAI_CONFIG = "genai_config.json"
TOKENIZER_ADVICE = (
    "put the model's tokenizer.json (or vocab.json and merges.txt, or tokenizer.model) into its "
    "folder, and set SPECOPS_TARGET or SPECOPS_DRAFT to that"
)
_WEIGHTS = re.compile(r"int4|int8|fp16|fp32|bf16")


class ModelError(RuntimeError):
    """A model that cannot be prepared; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """An exported model: a graph, a tokenizer, and what its manifest says of them.

    `parameters` is 0 where it is not known how many there are, and so are the sizes of layers.
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

    @classmethod
    def read(cls, path: Path, name: str) -> ModelFolder:
        """Read the manifest of an export.

        Raises:
            ModelError: the manifest is missing or does not say what it must.
        """
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            return cls(
                path=path,
                name=name,
                graph=path / _file_name(manifest["onnx_file"]),
                quant=manifest["quantization"]["name"],
                vocab_size=manifest["vocab_size"],
                context_length=manifest["context_length"],
                parameters=manifest["num_parameters"],
                bos_token=manifest["bos_token_id"],
                end_tokens=frozenset(manifest["eos_token_ids"]),
                hidden_size=manifest.get("hidden_size", 0),  # exports of older versions lack it
                num_heads=manifest.get("num_heads", 0),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{path / MANIFEST} cannot be used ({error!r}): export the model again"
            ) from error

    @classmethod
    def read_genai(cls, path: Path, name: str) -> ModelFolder:
        """Read the description of a model published for onnxruntime-genai.

        Raises:
            ModelError: the description, the graph or the tokenizer is missing, or the description
                does not say what it must.
        """
        try:
            model = json.loads((path / GENAI_CONFIG).read_text(encoding="utf-8"))["model"]
            file = _file_name(model["decoder"]["filename"])
            folder = cls(
                path=path,
                name=name,
                graph=path / file,
                quant=_weights_of(file),
                vocab_size=int(model["vocab_size"]),
                context_length=int(model["context_length"]),
                parameters=0,
                bos_token=model.get("bos_token_id"),
                end_tokens=_ids(model["eos_token_id"]),
                hidden_size=int(model["decoder"].get("hidden_size", 0)),
                num_heads=int(model["decoder"].get("num_attention_heads", 0)),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{path / GENAI_CONFIG} cannot be used ({error!r}): it must describe a decoder "
                "as onnxruntime-genai's model builder does"
            ) from error
        for needed in (folder.graph, path / "tokenizer.json"):
            if not needed.is_file():
                raise ModelError(f"{path} lacks {needed.name}: copy or download the whole folder")
        return folder


def _file_name(text: str) -> str:
    """The name of a file in the folder itself: a description may be a stranger's."""
    if Path(text).name != text or text in ("", ".."):
        raise ValueError(f"{text} is no file in the folder")
    return text


def _weights_of(file: str) -> str:
    found = _WEIGHTS.search(file)
    return found.group() if found else "onnx"


def _ids(value: Any) -> frozenset[int]:
    return frozenset(value if isinstance(value, list) else [value])
