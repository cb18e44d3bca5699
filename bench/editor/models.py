"""Qwen's shapes with random weights as GGUF files in 4 bits, for comparisons with llama.cpp.

llama.cpp's quantizer writes the file, and both sides read it. The vocabulary is Qwen2's, from
llama.cpp's source archive, plus the infill tokens that it lacks.
"""

import json
import shutil
from pathlib import Path

import gguf

from bench.models import current_folder
from bench.peers.environment import install
from bench.peers.models import run_module
from bench.tools.report import progress
from specops.models.convert.gguf.header import Metadata, read_header
from specops.models.convert.gguf.tokenizer import tokenizer_files
from tests.checkpoints import write_checkpoint
from tests.files.packages import llama_cpp
from tests.models.convert.gguf.files import write_gguf
from tests.models_e2e.repositories import REPOSITORIES

KIND = "Q4_0"
_GAP = {  # Qwen2.5's ids
    **{151659: "<|fim_prefix|>", 151660: "<|fim_middle|>", 151661: "<|fim_suffix|>"},
    **{151662: "<|fim_pad|>", 151663: "<|repo_name|>", 151664: "<|file_sep|>"},
}


def qwen(name: str, cache: Path) -> Path:
    """The GGUF of a Qwen repository's shape. The first call writes it, which takes minutes."""
    home = current_folder(cache, "editor")
    file = home / f"{name.rpartition('/')[2]}-{KIND}.gguf"
    if file.is_file():
        return file
    progress(f"writing {file}")
    part, repository = home / "part", REPOSITORIES[name]
    shutil.rmtree(part, ignore_errors=True)
    config = {**repository.config, "torch_dtype": "float16"}
    checkpoint, whole = part / "checkpoint", part / "float16.gguf"
    shapes = repository.shapes(config)
    write_checkpoint(checkpoint, config, shapes, seed=0, tokenizer=_vocabulary)
    kind = gguf.GGMLQuantizationType.F16
    write_gguf(checkpoint, whole, lambda tensor: kind, change=_as_published)
    run_module(install(cache / "environment"), "llama_model", whole, part, KIND)
    (part / f"{KIND}.gguf").rename(file)
    shutil.rmtree(part)
    return file


def _vocabulary(folder: Path, size: int) -> None:
    source = llama_cpp() / "models" / "ggml-vocab-qwen2.gguf"
    made = tokenizer_files(Metadata(read_header(source).metadata, source)).files["tokenizer.json"]
    for token in made["added_tokens"]:
        token["content"] = _GAP.get(token["id"], token["content"])
        token["special"] |= token["id"] in _GAP
    (folder / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")


def _as_published(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_pre("qwen2")
    writer.add_bos_token_id(151643)
    writer.add_eos_token_id(151643)
    writer.add_add_bos_token(False)
