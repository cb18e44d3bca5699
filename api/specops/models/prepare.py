"""From a model's name to folders with graphs: presets, downloads, conversions.

A conversion runs in a process of its own: its memory goes back when it ends, and the serving
process never imports the converter.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import signal
import subprocess  # nosec B404: runs only our own modules
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specops.config import ConfigError, Settings
from specops.models.conversions import Conversion, Conversions
from specops.models.folder import GENAI_CONFIG, MANIFEST, MEMORY_ADVICE, ModelError, ModelFolder
from specops.models.gguf_files import OWN_WEIGHTS, is_gguf
from specops.models.hub import HubModel, fetch
from specops.models.layout import LayoutError, Parts, parts_of
from specops.presets import CHAT, chat_model, in_environment, presets

__all__ = ["ModelChoice", "ModelError", "ModelFolder", "Source", "choose", "prepare"]

_DEFAULT_BLOCK = "-128"
_REPORT_SECONDS = 5.0
# How presets.toml begins what lies below SPECOPS_MODELS_DIR, and below the environment.
_BUNDLED, _FETCHED = "./", "share/"

Source = Path | HubModel
"""A checkpoint or an exported model: a folder, or a file of torch or llama.cpp, or on the hub."""

Downloading = Callable[[str, int, int], None]
"""Told what is downloaded, the bytes that are here and the bytes in all."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What to load, and the weights that it is wanted in."""

    name: str
    target: Source
    target_quant: str
    draft: Source | None
    draft_quant: str


def choose(settings: Settings) -> ModelChoice:
    """Apply the settings' overrides to their preset.

    Raises:
        ConfigError: there is no such preset, or it has no target and none is given, or weights are
            asked for of a GGUF, which has its own.
    """
    preset = presets().get(settings.preset)
    if preset is None:
        names = ", ".join(presets())
        raise ConfigError(f"SPECOPS_MODEL takes one of {names}, not {settings.model}")
    if not (settings.target or preset.target):
        raise ConfigError(
            "SPECOPS_TARGET takes a folder, a .pt or .gguf file or org/name; "
            f"{settings.model} needs one"
        )
    if settings.preset == CHAT and not settings.target and not chat_model().is_file():
        raise ConfigError(
            f"SPECOPS_MODEL={CHAT} needs {chat_model()}, which is missing: fetch it with "
            f"scripts/chat_model.py, or take {CHAT}-hf, which is on the hub"
        )
    # A preset's draft fits the preset's target; another target needs to be given its own.
    draft = settings.draft or ("none" if settings.target else preset.draft)
    target = _source(settings.target, preset.target, settings.models_dir)
    small = None if draft == "none" else _source(settings.draft, draft, settings.models_dir)
    return ModelChoice(
        name=_name(target) if settings.target else settings.preset,
        target=target,
        target_quant=_quant(target, settings.quant, preset.quant, "SPECOPS_QUANT"),
        draft=small,
        draft_quant=_quant(small, settings.draft_quant, preset.draft_quant, "SPECOPS_DRAFT_QUANT"),
    )


def prepare(
    source: Source,
    quant: str,
    *,
    name: str,
    cache_dir: Path,
    report: Callable[[str], None],
    downloading: Downloading | None = None,
) -> ModelFolder:
    """Find a model's exported form, or make it.

    Args:
        source: an exported folder, one in onnxruntime-genai's layout, a checkpoint in the Hugging
            Face layout (which may carry exports in `onnx/<quant>`), a state dict that torch saved
            with its configuration, a GGUF or one of its shards, or a model on the hub that is one
            of these.
        quant: the weights wanted, such as `int8-128`; an exported folder keeps its own, and a GGUF
            too, whose quantization is `gguf`.
        name: the model's name in messages and metrics.
        cache_dir: where downloads and conversions are kept.
        report: told when a conversion begins, and how far it is.
        downloading: told how a download goes.

    Raises:
        ModelError: the model is missing, cannot be downloaded or cannot be converted.
    """
    if isinstance(source, HubModel):
        path = fetch(source, cache_dir, _progress(source, downloading)) / source.gguf
    else:
        path = source
    if (path / MANIFEST).is_file():
        return ModelFolder.read(path, name)
    bundled = path / "onnx" / quant
    if (bundled / MANIFEST).is_file():
        return ModelFolder.read(bundled, name)
    if (path / GENAI_CONFIG).is_file():
        return ModelFolder.read_genai(path, name)
    try:
        parts = parts_of(path)
    except LayoutError as error:
        raise ModelError(str(error)) from error
    conversions = Conversions(cache_dir / "converted")
    found = conversions.find(path, parts, quant, report=report)
    if found is None:
        found = _converted(conversions, path, parts, quant, source=source, report=report)
    return ModelFolder.read(found.folder, name)


def _converted(
    conversions: Conversions,
    path: Path,
    parts: Parts,
    quant: str,
    *,
    source: Source,
    report: Callable[[str], None],
) -> Conversion:
    """Convert a checkpoint, or wait for the process that does."""
    work = f"converting {source} to {quant}"
    try:
        with conversions.held(path, parts, quant, name=_name(source), report=report) as made:
            if not made.exists:
                report(work)
                with _in_order(path, parts, made) as checkpoint:
                    _run(
                        "specops.models.convert",
                        *(*checkpoint, str(made.folder), "--quant", quant),
                        *("--source-digest", made.source_digest),
                        lock=made.lock,
                        tell=_percents(work, report),
                    )
    except OSError as error:
        raise ModelError(
            f"{path} cannot be converted ({error}): SPECOPS_CACHE_DIR takes a folder that can be "
            "written, with room for the converted weights"
        ) from error
    return made


def _source(given: str, preset: str, models_dir: Path) -> Source:
    """What is given: a path that exists, a name on the hub, or a path; else what a preset says."""
    if given:
        for path in (Path(given), models_dir / given):
            if path.exists():
                return path
    elif preset.startswith(_BUNDLED):
        return models_dir / preset
    elif preset.startswith(_FETCHED):
        return in_environment(preset)
    return HubModel.parse(given or preset) or Path(given)


def _name(source: Source) -> str:
    if isinstance(source, HubModel):
        return source.name
    return source.stem if source.is_file() else source.resolve().name


def _quant(source: Source | None, given: str, preset: str, variable: str) -> str:
    """The full name of the weights wanted of a source; of a GGUF, its own."""
    if source is None or not _is_gguf(source):
        return _with_block(given or preset)
    if given:
        raise ConfigError(
            f"{variable} is {given}, but {source} is a GGUF, which keeps the weights that it has: "
            f"leave {variable} empty"
        )
    return OWN_WEIGHTS


def _is_gguf(source: Source) -> bool:
    return bool(source.gguf) if isinstance(source, HubModel) else is_gguf(source)


def _with_block(quant: str) -> str:
    """A quantization's full name: the block always."""
    match = re.fullmatch(r"(int[48])(-\d+)?(-rtn)?", quant)
    if match is None:
        return quant
    bits, block, data_free = match.groups()
    return f"{bits}{block or _DEFAULT_BLOCK}{data_free or ''}"


def _progress(model: HubModel, downloading: Downloading | None) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        if downloading is not None:
            downloading(f"{model}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB", done, total)

    return tell


@contextmanager
def _in_order(path: Path, parts: Parts, made: Conversion) -> Iterator[list[str]]:
    """How to tell the converter of a checkpoint that has its layout: itself, or a copy.

    The copy lasts as long as this does. Weights are never copied.
    """
    if parts.in_order:
        yield [str(path)]
        return
    copy = made.folder.with_name(f".{made.folder.name}.layout")
    try:
        _run("specops.models.layout", str(path), str(copy), lock=made.lock)
        weights = parts.state_dicts or (path,)
        yield [*(f"--weights={place}" for place in weights), str(copy)]
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _percents(work: str, report: Callable[[str], None]) -> Callable[[str], None]:
    """Passes on the converter's percentages, with what is being done and how long it will take."""
    started = told = time.monotonic()

    def tell(line: str) -> None:
        nonlocal told
        now = time.monotonic()
        if line.endswith(" %") and now - told >= _REPORT_SECONDS:
            told = now
            done = max(1, int(line.removesuffix(" %")))
            left = math.ceil((now - started) * (100 - done) / done / 60)
            report(f"{work}: {line}" + (f", about {left} min left" if left > 1 else ""))

    return tell


def _run(
    module: str,
    *arguments: str,
    lock: int | None = None,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Run one of our modules in a process of its own; `tell` gets the lines that it prints.

    It keeps the `lock` should this process be killed, so that no other clears what it is writing.

    Raises:
        ModelError: it failed; the message is what it said.
    """
    command = [sys.executable, "-m", module, *arguments]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(  # noqa: S603 # nosec B603: our own module, paths as arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            pass_fds=() if lock is None else (lock,),
        ) as process,
    ):
        for line in process.stdout or ():
            if tell is not None:
                tell(line.strip())
        if status := process.wait():
            errors.seek(0)
            said = _advised(status, errors.read().strip())
            raise ModelError(f"{arguments[0]} cannot be converted: {said}")


def _advised(status: int, said: str) -> str:
    """What a process that failed said, and what to do where it cannot know that."""
    if status < 0:
        return f"{signal.Signals(-status).name} ended it, {MEMORY_ADVICE}"
    if os.strerror(errno.ENOSPC) in said:
        said += "; SPECOPS_CACHE_DIR takes a folder with room for the converted weights"
    return said
