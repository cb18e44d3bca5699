"""The models of the benchmarks: the service's own, and random ones of sizes that people use.

Published weights of 1.1 billion parameters need a network, and benchmarks do not need them: the
time of a pass depends on the shapes, not on the values of the weights.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.memory.cgroup import Cgroup, evict
from bench.tools.report import progress
from specops.config import ConfigError, Settings
from specops.engine.engine import NO_DRAFTER
from specops.models import convert as export
from specops.models.folder import ModelFolder
from specops.models.prepare import choose, prepare
from specops.presets import DEMO
from specops.system.folders import atomic_folder
from tests import checkpoints, random_weights
from tests.checkpoints import make_checkpoint, make_llama_checkpoint
from tests.eagle_heads import write_head
from tests.models_e2e.repositories import REPOSITORIES
from tests.mtp_blocks import make_checkpoint as make_mtp_checkpoint
from training.corpus import load_corpus

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "bench"
TINYLLAMA_VOCAB = 32_000
TINYLLAMA, LLAMA_160M = "tinyllama", "llama-160m"
_INT4 = "int4-128-rtn"  # plain rounding: calibration gains nothing with random weights
_CONTEXT = 512  # of a random model: enough for a benchmark, with a small KV cache


class BuildError(RuntimeError):
    """A random model could not be exported."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model to measure: its key in results, its title in tables, the settings that load it."""

    key: str
    title: str
    settings: Settings

    def folder(self) -> ModelFolder:
        """The target's folder, prepared as by the engine."""
        choice, cache = choose(self.settings), self.settings.cache_dir
        target, quant = choice.target, choice.target_quant
        return prepare(target, quant, name=choice.name, cache_dir=cache, report=lambda text: None)


def _settings(default: str = DEMO) -> Settings:
    """The environment's settings without a prefix cache, so that every prompt is computed."""
    named = {"SPECOPS_MODEL": os.environ.get("SPECOPS_MODEL") or default}
    return replace(Settings.from_env({**os.environ, **named}), prefix_cache="off")


def configured(default: str = DEMO) -> BenchModel:
    """The model named by `SPECOPS_*`, or else the preset `default`."""
    settings = _settings(default)
    name = choose(settings).name
    return BenchModel(name, f"{name} model", settings)


def tinyllama(cache: Path = CACHE) -> BenchModel:
    """TinyLlama-1.1B's architecture in int4, without a draft model."""
    target = shape(TINYLLAMA, _INT4, cache)
    return BenchModel(
        "tinyllama-shape", "TinyLlama-1.1B shape, random weights", plain(target, target.parent)
    )


def tinyllama_with_head(cache: Path = CACHE) -> BenchModel:
    """The same model with an EAGLE-3 head."""
    model = tinyllama(cache)
    head = _random_head(TINYLLAMA, Path(str(model.settings.target)))
    settings = replace(model.settings, draft=str(head))
    return replace(model, title=f"{model.title}, with a head", settings=settings)


def plain(target: Path, cache_dir: Path) -> Settings:
    """Settings for a model in its stored weights, without a draft model."""
    return replace(
        _settings(), target=str(target), draft=NO_DRAFTER, quant="", draft_quant="",
        context=_CONTEXT, cache_dir=cache_dir,
    )  # fmt: skip


def shape_folder(name: str, quant: str, cache: Path = CACHE) -> Path:
    """Where `shape` keeps an export."""
    return _home(cache) / f"{name.rpartition('/')[2]}-{quant}"


def shape(name: str, quant: str, cache: Path = CACHE, *, cap: Cgroup | None = None) -> Path:
    """An architecture with random weights: that of a published repository, or one defined here.

    The first call takes about a minute and 3 GB of disk for TinyLlama, two minutes and 12 GB for
    Phi-3 Mini. The export runs in a separate process, which frees its memory.

    Args:
        name: a published repository or a key of `_WRITERS`.
        quant: quantization of the weights.
        cache: keeps the export until the exporter's code changes.
        cap: cgroup of the export, if any.

    Returns:
        The folder of the export.

    Raises:
        BuildError: the export failed, or the kernel killed it.
    """
    folder = shape_folder(name, quant, cache)
    if folder.is_dir():
        return folder
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    shutil.rmtree(checkpoint, ignore_errors=True)
    try:
        progress(f"writing a random checkpoint to {checkpoint} and exporting it to {folder}")
        if name in _WRITERS:
            _WRITERS[name](checkpoint)
        else:
            REPOSITORIES[name].write(checkpoint, None)
        command = [sys.executable, "-m", "specops.models.convert", str(checkpoint), str(folder)]
        command += ["--quant", quant]
        if cap is not None:
            evict(checkpoint)  # pages already in memory would not be charged to the group
            command = cap.enclosed(command)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip() or f"it ended with {done.returncode}"
            raise BuildError(f"{checkpoint} cannot be exported: {reason}")
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return folder


def chosen(names: Collection[str], only: str) -> list[str]:
    """The names that contain one of the parts of `only`, which commas separate.

    Raises:
        ConfigError: there is none.
    """
    parts = only.split(",")
    if found := [name for name in names if any(part in name for part in parts)]:
        return found
    raise ConfigError(f"{only!r} is in no name: {', '.join(names)}")


def head_shape(name: str, cache: Path = CACHE) -> Path:
    """The checkpoint of a published draft head with random weights, next to the shapes."""
    folder = _home(cache) / name.rpartition("/")[2]
    if not folder.is_dir():
        with atomic_folder(folder) as part:
            REPOSITORIES[name].write(part, None)
    return folder


def _home(cache: Path) -> Path:
    """The folder for exports of this exporter's version."""
    return current_folder(cache, "shapes", Path(export.__file__).parent.rglob("*.py"))


def current_folder(cache: Path, name: str, sources: Iterable[Path] = (), *more: str) -> Path:
    """The folder for models that the current sources make; removes those of other versions.

    Args:
        cache: where the folder is.
        name: start of the folder's name.
        sources: files that make the models, in addition to those that draw random checkpoints.
        more: whatever else the models depend on.
    """
    digest = hashlib.sha256("\n".join(more).encode())
    drawing = (Path(str(module.__file__)) for module in (checkpoints, random_weights))
    for path in (*drawing, *sorted(sources)):
        digest.update(path.read_bytes())
    home = cache / f"{name}-{digest.hexdigest()[:12]}"
    for outdated in set(cache.glob(f"{name}-*")) - {home}:
        shutil.rmtree(outdated)
    return home


def tinyllama_checkpoint(path: Path, dtype: str = "bfloat16") -> None:
    """Write TinyLlama-1.1B's architecture with the same random weights every time (2.2 GB)."""
    make_llama_checkpoint(
        path, hidden=2048, layers=22, heads=32, kv_heads=4, ffn=5632, vocab=TINYLLAMA_VOCAB,
        context=2048, dtype=dtype,
    )  # fmt: skip
    _write_tokenizer(path)


def _llama_160m_checkpoint(path: Path) -> None:
    make_llama_checkpoint(
        path, hidden=768, layers=12, heads=12, kv_heads=12, ffn=3072, vocab=TINYLLAMA_VOCAB,
        context=2048, seed=1, dtype="bfloat16",
    )  # fmt: skip
    _write_tokenizer(path)


# Functions that write small models with heads, and with kinds of layers that Llama lacks.
HEAD_KINDS: dict[str, Callable[[Path], Any]] = {
    "eagle-3-head": partial(make_llama_checkpoint, layers=8, context=2048),
    "mtp-block": partial(make_mtp_checkpoint, with_states=True, layers=4, context=2048),
}
LAYER_KINDS: dict[str, Callable[[Path], Any]] = {
    **HEAD_KINDS,
    "short-convolution": partial(make_checkpoint, kind="lfm2", layers=4, context=2048),
    "gated-delta": partial(make_checkpoint, kind="qwen3_5_text", context=2048),
    "state-space": partial(make_checkpoint, kind="granitemoehybrid", context=2048),
    "heads-by-layer": partial(make_checkpoint, kind="gemma4_text", context=2048),
}


def layer_kind(name: str, cache: Path = CACHE) -> BenchModel:
    """A small random model of LAYER_KINDS, drafted by a head or by itself in 4 bits."""
    target = shape(name, "int8-32", cache)
    if name not in HEAD_KINDS:
        draft = str(shape(name, "int4-32-rtn", cache))
    else:
        draft = "" if name == "mtp-block" else str(_random_head(name, target))
    settings = replace(plain(target, target.parent), draft=draft, context=2048)
    return BenchModel(name, f"small random model, {name.replace('-', ' ')}", settings)


_HEAD_SIZES: dict[str, dict[str, Any]] = {
    TINYLLAMA: {"hidden": 2048, "rows": 8192, "sizes": (32, 4, 64, 5632)}
}


def _random_head(kind: str, target: Path) -> Path:
    """An EAGLE-3 head with random weights, next to its target's folder."""
    folder = target.with_name(f"{kind}-head")
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint = Path(scratch) / "target"
            _WRITERS[kind](checkpoint)
            write_head(folder, target=checkpoint, **_HEAD_SIZES.get(kind, {}))
    return folder


_WRITERS = LAYER_KINDS | {TINYLLAMA: tinyllama_checkpoint, LLAMA_160M: _llama_160m_checkpoint}


def _write_tokenizer(checkpoint: Path) -> None:
    """Write a full-sized vocabulary, so that detokenizing has its real cost."""
    texts = (document.text for document in load_corpus().library)
    checkpoints.train_tokenizer(checkpoint, texts, TINYLLAMA_VOCAB)
