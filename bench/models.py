"""The models that the benchmarks run: the service's own, and one of a size that people really use.

No 1.1 B-parameter weights are within reach of a machine without a network, and none are needed:
how long a pass takes depends on the shapes, not on what the weights say.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from specops.config import Settings
from specops.engine.engine import NO_DRAFTER
from specops.models import convert as export
from specops.models.folder import ModelFolder
from specops.models.prepare import choose, prepare
from specops.presets import DEMO
from tests import checkpoints, random_weights
from tests.checkpoints import make_llama_checkpoint
from tests.models_e2e.repositories import REPOSITORIES
from training.corpus import load_corpus

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "bench"
TINYLLAMA_VOCAB = 32_000
TINYLLAMA, LLAMA_160M = "tinyllama", "llama-160m"
_INT4 = "int4-128-rtn"  # random weights have nothing to look at
_CONTEXT = 512  # of the random model: enough for a benchmark, and a small KV cache

Progress = Callable[[str], None]


class BuildError(RuntimeError):
    """The random model could not be exported."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model to measure: what tables call it, and the settings that load it."""

    key: str
    title: str
    settings: Settings

    def folder(self) -> ModelFolder:
        """The target's folder, prepared as the engine prepares it."""
        choice, cache = choose(self.settings), self.settings.cache_dir
        target, quant = choice.target, choice.target_quant
        return prepare(target, quant, name=choice.name, cache_dir=cache, report=lambda text: None)


def _settings(default: str = DEMO) -> Settings:
    """The environment's, by default the demo pair; every prompt is computed however often asked."""
    named = {"SPECOPS_MODEL": os.environ.get("SPECOPS_MODEL") or default}
    return replace(Settings.from_env({**os.environ, **named}), prefix_cache="off")


def configured(default: str = DEMO) -> BenchModel:
    """The model that `SPECOPS_*` name, else the preset `default`."""
    settings = _settings(default)
    name = choose(settings).name
    return BenchModel(name, f"{name} model", settings)


def tinyllama(progress: Progress, cache: Path = CACHE, draft_quant: str = "") -> BenchModel:
    """TinyLlama-1.1B's architecture in int4; with `draft_quant` drafted by Llama 160M's in that."""
    target = shape(TINYLLAMA, _INT4, progress, cache)
    draft = shape(LLAMA_160M, draft_quant, progress, cache) if draft_quant else NO_DRAFTER
    own = {"target": str(target), "draft": str(draft), "quant": "", "draft_quant": ""}
    settings = replace(_settings(), **own, context=_CONTEXT, cache_dir=target.parent)
    key, title = "tinyllama-shape", "TinyLlama-1.1B shape, random weights"
    if draft_quant:
        key, title = "tinyllama-pair", "TinyLlama-1.1B and Llama 160M, random weights"
    return BenchModel(key, title, settings)


def shape(name: str, quant: str, progress: Progress, cache: Path = CACHE) -> Path:
    """An architecture with random weights: TINYLLAMA, LLAMA_160M or a published repository.

    Returns the folder of the export in `quant`, which is kept in `cache` until the exporter
    changes. The first call takes about a minute and 3 GB of disk for TinyLlama, two minutes and
    12 GB for Phi-3 Mini.
    """
    home = cache / f"shapes-{_exporter_digest()}"
    folder = home / f"{name.rpartition('/')[2]}-{quant}"
    if folder.is_dir():
        return folder
    for outdated in set(cache.glob("shapes-*")) - {home}:
        shutil.rmtree(outdated)
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    try:
        progress(f"writing a random checkpoint to {checkpoint} and exporting it to {folder}")
        if name == TINYLLAMA:
            tinyllama_checkpoint(checkpoint)
        elif name == LLAMA_160M:
            llama_160m_checkpoint(checkpoint)
        else:
            REPOSITORIES[name].write(checkpoint, None)
        if name in (TINYLLAMA, LLAMA_160M):
            shutil.copy(_tokenizer(home, progress), checkpoint / "tokenizer.json")
        command = [sys.executable, "-m", "specops.models.convert", str(checkpoint), str(folder)]
        command += ["--quant", quant]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{checkpoint} cannot be exported: {done.stderr.strip()}")
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return folder


def _exporter_digest() -> str:
    """Changes with the exporter's code, which may draw another graph, and with the weights."""
    digest = hashlib.sha256(weights_digest().encode())
    for path in sorted(Path(export.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def weights_digest() -> str:
    """Changes with the code that draws the random checkpoints."""
    digest = hashlib.sha256()
    for module in (checkpoints, random_weights):
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()


def tinyllama_checkpoint(path: Path, dtype: str = "bfloat16") -> None:
    """Write TinyLlama-1.1B's architecture with the same random weights every time (2.2 GB)."""
    make_llama_checkpoint(
        path, hidden=2048, layers=22, heads=32, kv_heads=4, ffn=5632, vocab=TINYLLAMA_VOCAB,
        context=2048, dtype=dtype,
    )  # fmt: skip


def llama_160m_checkpoint(path: Path) -> None:
    """Write Llama 160M's architecture with random weights."""
    make_llama_checkpoint(
        path, hidden=768, layers=12, heads=12, kv_heads=12, ffn=3072, vocab=TINYLLAMA_VOCAB,
        context=2048, seed=1, dtype="bfloat16",
    )  # fmt: skip


def _tokenizer(home: Path, progress: Progress) -> Path:
    """A full-sized vocabulary, so that turning tokens into text costs what it really does."""
    path = home / "tokenizer.json"
    if path.is_file():
        return path
    progress(f"training a tokenizer of {TINYLLAMA_VOCAB} entries")
    home.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        (document.text for document in load_corpus().library),
        vocab_size=TINYLLAMA_VOCAB,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.save(str(path))
    return path
