"""Which files of a repository make a model: of several kinds of weights, one."""

from __future__ import annotations

import re

from specops.models.folder import GENAI_CONFIG
from specops.models.gguf_files import shards_of

_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
_SENTENCEPIECE = "tokenizer.model"  # fetched where there is no other
_TOKENIZERS = ({"tokenizer.json"}, {"vocab.json", "merges.txt"})  # each all that is needed
_SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_STATE_DICTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_ONNX = re.compile(r".+\.onnx([._]data)?")


def choose_files(names: set[str], gguf: str = "") -> list[str]:
    """The names that are needed to load a model, of all that lie beside each other.

    Args:
        gguf: the file that is wanted, or one of its shards, where it is to be a GGUF.

    Raises:
        ValueError: no form of weights that can be used is among them.
    """
    if gguf:
        chosen = shards_of(gguf)
        missing = [name for name in chosen if name not in names]
        if missing:
            raise ValueError(f"no {missing[0]}")
        return chosen
    common = [name for name in (*_CONFIGS, *_TOKENIZER) if name in names]
    if _SENTENCEPIECE in names and not any(needed <= names for needed in _TOKENIZERS):
        common.append(_SENTENCEPIECE)
    if GENAI_CONFIG in names:
        return [*common, GENAI_CONFIG, *sorted(filter(_ONNX.fullmatch, names))]
    for kind in (_SAFETENSORS, _STATE_DICTS):
        weights = sorted(filter(kind.fullmatch, names))
        index = [name for name in weights if name.endswith(".index.json")]
        single = [name for name in weights if "-of-" not in name and name not in index]
        chosen = single or ([name for name in weights if name not in single] if index else [])
        if chosen and "config.json" in names:
            return [*common, *chosen]
    raise ValueError("neither safetensors nor PyTorch weights with a config.json")


def has_tokenizer(names: set[str]) -> bool:
    """Whether a tokenizer can be read from the files, or made of them."""
    return any(needed <= names for needed in (*_TOKENIZERS, {_SENTENCEPIECE}))
