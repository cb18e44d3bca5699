"""The models that the benchmarks run: the service's own, and one of a size that people really use.

No 1.1 B-parameter weights are within reach of a machine without a network, and none are needed:
how long a pass takes depends on the shapes, not on what the weights say.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

from specops import export
from specops.config import Settings
from specops.engine import NO_DRAFTER
from specops.graphs import Graph, load_graph
from specops.models.folder import ModelFolder
from specops.models.prepare import choose, prepare
from tests import checkpoints, random_weights
from tests.checkpoints import make_llama_checkpoint
from tests.models_e2e.repositories import REPOSITORIES
from training.corpus import load_corpus

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "bench"
TINYLLAMA_VOCAB = 32_000
_TINYLLAMA_QUANT = "int4-128"
_CONTEXT = 512  # of the random model: enough for a benchmark, and a small KV cache

Progress = Callable[[str], None]


class BuildError(RuntimeError):
    """The random model could not be exported."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model to measure: what tables call it, and the settings that load it.

    `large` says that a pass takes so long that the layers around it should not be seen beside it.
    """

    key: str
    title: str
    settings: Settings
    large: bool

    def folder(self) -> ModelFolder:
        """The target's folder, prepared as the engine prepares it."""
        choice = choose(self.settings)
        return prepare(
            choice.target,
            choice.target_quant,
            name=choice.name,
            cache_dir=self.settings.cache_dir,
            report=_ignore,
        )

    def graph(self) -> Graph:
        """The target's graph, loaded as the engine loads it with these settings.

        The process's thread pool must be there, see `specops.session.share_threads`. How the
        weights lie in memory decides much of the speed: whoever is compared with the engine loads
        the same file.
        """
        return load_graph(self.folder(), self.settings, _ignore)


def _ignore(detail: str) -> None:
    """Take no notice: the engine tells what it does."""


def _settings() -> Settings:
    """The environment's; every prompt is computed, however often a benchmark asks the same."""
    return replace(Settings.from_env(), prefix_cache="off")


def configured() -> BenchModel:
    """The model that the service would serve: the demo pair, unless `SPECOPS_*` say otherwise."""
    settings = _settings()
    name = choose(settings).name
    return BenchModel(name, f"{name} model", settings, large=False)


def tinyllama(progress: Progress, cache: Path = CACHE) -> BenchModel:
    """TinyLlama-1.1B's architecture with random weights in int4, kept in `cache` (about 2 GB).

    The first call takes about a minute and 3 GB of disk.

    Raises:
        BuildError: the exporter refused the checkpoint.
    """
    home = cache / f"tinyllama-{_exporter_digest()}"
    folder = home / "model"
    if not folder.is_dir():  # the exporter makes it appear when it is complete
        for outdated in cache.glob("tinyllama-*"):
            shutil.rmtree(outdated)
        _build_tinyllama(home / "checkpoint", folder, progress)
    settings = replace(
        _settings(),
        target=str(folder),
        draft=NO_DRAFTER,
        quant="",
        context=_CONTEXT,
        cache_dir=home,
    )
    title = "TinyLlama-1.1B shape, random weights"
    return BenchModel("tinyllama-shape", title, settings, large=True)


def tinyllama_pair(progress: Progress, quant: str, cache: Path = CACHE) -> tuple[Path, Path]:
    """TinyLlama's architecture in `quant` and Llama 160M's as its draft in int8, random weights.

    Kept in `cache`; the first call for a `quant` takes about a minute and 3 GB of disk.

    Returns:
        The folders of target and draft, which share a tokenizer.

    Raises:
        BuildError: the exporter refused a checkpoint.
    """
    home = cache / f"pair-{_exporter_digest()}"
    target, draft, tokenizer = home / f"target-{quant}", home / "draft", home / "tokenizer.json"
    home.mkdir(parents=True, exist_ok=True)
    if not tokenizer.is_file():
        progress(f"training a tokenizer of {TINYLLAMA_VOCAB} entries")
        _write_tokenizer(tokenizer)
    writers = {target: (tinyllama_checkpoint, quant), draft: (llama_160m_checkpoint, "int8-128")}
    for folder, (write, weights) in writers.items():
        if folder.is_dir():
            continue
        checkpoint = home / f"{folder.name}-checkpoint"
        try:
            progress(f"writing a random checkpoint and exporting it to {folder}")
            write(checkpoint)
            shutil.copy(tokenizer, checkpoint / "tokenizer.json")
            _export(checkpoint, folder, weights)
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)
    return target, draft


def phi3(progress: Progress, quant: str, cache: Path = CACHE) -> Path:
    """Phi-3 Mini's architecture in `quant`, random weights; the folder of the export.

    Kept in `cache`; the first call for a `quant` takes about two minutes and 12 GB of disk.

    Raises:
        BuildError: the exporter refused the checkpoint.
    """
    home = cache / f"phi3-{_exporter_digest()}"
    folder, checkpoint = home / f"phi3-{quant}", home / "checkpoint"
    if not folder.is_dir():
        try:
            progress(f"writing a random checkpoint of 3.8 B parameters to {checkpoint}")
            REPOSITORIES["microsoft/Phi-3-mini-4k-instruct"].write(checkpoint, None)
            progress(f"exporting it to {folder}")
            _export(checkpoint, folder, quant)
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
        path,
        hidden=2048,
        layers=22,
        heads=32,
        kv_heads=4,
        ffn=5632,
        vocab=TINYLLAMA_VOCAB,
        context=2048,
        dtype=dtype,
    )


def llama_160m_checkpoint(path: Path) -> None:
    """Write Llama 160M's architecture with random weights."""
    make_llama_checkpoint(
        path,
        hidden=768,
        layers=12,
        heads=12,
        kv_heads=12,
        ffn=3072,
        vocab=TINYLLAMA_VOCAB,
        context=2048,
        seed=1,
        dtype="bfloat16",
    )


def _build_tinyllama(checkpoint: Path, folder: Path, progress: Progress) -> None:
    try:
        progress(f"writing a random checkpoint of 1.1 B parameters to {checkpoint}")
        tinyllama_checkpoint(checkpoint)
        progress(f"training its tokenizer of {TINYLLAMA_VOCAB} entries")
        _write_tokenizer(checkpoint / "tokenizer.json")
        progress(f"exporting it to {folder}")
        _export(checkpoint, folder, _TINYLLAMA_QUANT)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)


def _write_tokenizer(path: Path) -> None:
    """A full-sized vocabulary, so that turning tokens into text costs what it really does."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        (document.text for document in load_corpus().library),
        vocab_size=TINYLLAMA_VOCAB,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.save(str(path))


def _export(checkpoint: Path, folder: Path, quant: str) -> None:
    command = [sys.executable, "-m", "specops.export", str(checkpoint), str(folder)]
    done = subprocess.run([*command, "--quant", quant], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{checkpoint} cannot be exported: {done.stderr.strip()}")
