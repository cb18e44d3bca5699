"""Goes from a model's name to folders with graphs: presets, downloads, conversions.

A conversion runs in a child process. Its memory is freed when it ends, and the serving process
never imports the converter.
"""

import errno
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specops.config import ConfigError, Settings
from specops.models.child import ChildError, run_module
from specops.models.contract import MANIFEST, WARNING
from specops.models.conversions import converted
from specops.models.errors import ModelError
from specops.models.folder import GENAI_CONFIG, ModelFolder
from specops.models.gguf_files import OWN_WEIGHTS, is_gguf
from specops.models.head_folder import EagleFolder, is_head_checkpoint
from specops.models.hub import CONFIG, Check, HubModel, Progress, is_complete
from specops.models.layout import Parts, parts_of
from specops.models.progress import every
from specops.presets import CHAT, chat_model, in_environment, presets
from specops.system.folders import locked
from specops.weights import WeightsName

log = logging.getLogger(__name__)
__all__ = ["ModelChoice", "ModelError", "ModelFolder", "Source", "choose", "prepare"]

_REPORT_SECONDS = 5.0
_FEW_PERCENT = 2  # fewer do not show the remaining time
_HEAD_QUANT = "int8-64"
_NO_DRAFT = "none"
# In presets.toml: how paths below SPECOPS_MODELS_DIR and below the environment begin.
_BUNDLED, _FETCHED = "./", "share/"

Source = Path | HubModel
"""A checkpoint or an exported model: a folder, a file of torch or llama.cpp, or on the hub."""

Downloading = Callable[[str, int, int], None]
"""Called with a line about the progress, the number of bytes here and the number of all bytes."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which models to load, and the weights of each.

    `uses_mtp` says whether the target's own MTP block drafts, if it has one.
    """

    name: str
    target: Source
    target_quant: str
    draft: Source | None
    draft_quant: str
    uses_mtp: bool


def choose(settings: Settings) -> ModelChoice:
    """Apply the settings' overrides to their preset.

    Raises:
        ConfigError: there is no target; the preset's chat model is not installed; or the settings
            ask for weights of a GGUF, which has its own.
    """
    preset = presets()[settings.preset]
    if not (settings.target or preset.target):
        raise ConfigError(
            f"SPECOPS_MODEL={settings.model} names no model: set SPECOPS_TARGET to a folder, a "
            ".pt or .gguf file, or org/name on the hub"
        )
    if settings.preset == CHAT and not settings.target and not chat_model().is_file():
        raise ConfigError(
            f"SPECOPS_MODEL={CHAT} needs {chat_model()}, which is missing: run "
            f"scripts/chat_model.py to download it, or set SPECOPS_MODEL={CHAT}-hf"
        )
    # The preset's draft fits the preset's target. Another target needs another draft.
    draft = settings.draft or ("" if settings.target else preset.draft)
    target = _source(settings.target, preset.target, settings.models_dir)
    small = None
    if draft not in ("", _NO_DRAFT):
        small = _source(settings.draft, draft, settings.models_dir)
    return ModelChoice(
        name=_name(target) if settings.target else settings.preset,
        target=target,
        target_quant=_quant(target, settings.quant, preset.quant, "SPECOPS_QUANT"),
        draft=small,
        draft_quant=_quant(small, settings.draft_quant, preset.draft_quant, "SPECOPS_DRAFT_QUANT"),
        uses_mtp=not draft,
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
            Face layout (which may have exports in `onnx/<quant>`), a state dict that torch saved
            with its configuration, a GGUF or one of its shards, or a model on the hub that is one
            of these.
        quant: the weights, such as `int8-128`; an exported folder keeps its own, and so does
            a GGUF, whose quantization is `gguf`.
        name: the model's name in messages and metrics.
        cache_dir: the folder for downloads and conversions.
        report: called when a conversion begins, and with how far it is.
        downloading: called with how far a download is.

    Raises:
        ModelError: the model is missing, cannot be downloaded or cannot be converted.
    """
    path = located(source, cache_dir, downloading, tokenizer=True)
    if is_head_checkpoint(path):
        raise ModelError(
            f"{source} is a draft head: set SPECOPS_DRAFT to it, and SPECOPS_TARGET to its model"
        )
    for folder in (path, path / "onnx" / quant):
        if (folder / MANIFEST).is_file():
            return ModelFolder.read(folder, name)
    if (path / GENAI_CONFIG).is_file():
        return ModelFolder.read_genai(path, name)
    work = f"converting {source} to {quant}" if quant else f"converting {source}"

    def convert(parts: Parts, folder: Path, digest: str, lock: int) -> None:
        report(work)
        _convert(path, parts, folder, quant, digest, lock=lock, tell=_percents(work, report))

    folder = _conversion(source, path, quant, cache_dir=cache_dir, convert=convert, report=report)
    return replace(
        ModelFolder.read(folder, name), template_folder=path.parent if is_gguf(path) else None
    )


def prepare_head(
    source: Source,
    target: ModelFolder,
    quant: str,
    *,
    cache_dir: Path,
    report: Callable[[str], None],
) -> EagleFolder:
    """Find the form of an EAGLE-3 head that runs with a target, or make it.

    Args:
        source: the head's checkpoint.
        target: the target.
        quant: the weights; empty for the usual ones.
        cache_dir: the folder for conversions.
        report: called when a conversion begins.

    Raises:
        ModelError: the head is damaged, of another kind, or belongs to another model.
    """
    path = located(source, cache_dir)
    parsed = WeightsName.parse(quant or _HEAD_QUANT)
    quant = parsed.full if parsed else quant

    def convert(parts: Parts, folder: Path, digest: str, lock: int) -> None:
        report(f"converting the draft head {source} for {target.name}")
        weights = [f"--weights={file}" for file in parts.state_dicts]
        run_module(
            "specops.models.eagle.convert",
            *(str(path), str(target.graph), str(folder), *weights),
            *("--quant", quant, "--context", str(target.context_length)),
            lock=lock,
        )

    folder = _conversion(
        source,
        path,
        quant,
        cache_dir=cache_dir,
        convert=convert,
        report=report,
        tokenizer=False,
        depends_on=(target.graph, target.graph.with_name(MANIFEST)),
    )
    return EagleFolder.read(folder)


def located(
    source: Source,
    cache_dir: Path,
    downloading: Downloading | None = None,
    *,
    tokenizer: bool = False,
) -> Path:
    """Return where the files of a model or a head are; download them if they are on the hub.

    Args:
        source: the model or head.
        cache_dir: the folder for downloads.
        downloading: called with how far a download is.
        tokenizer: whether there must be one.

    Raises:
        ModelError: the download failed.
    """
    if isinstance(source, Path):
        return source

    def tell(done: int, total: int) -> None:
        if downloading is not None:
            downloading(f"{source}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB", done, total)

    check = partial(_check if tokenizer else _check_draft, str(source))
    return fetch(source, cache_dir, tell, tokenizer=tokenizer, check=check) / source.gguf


def fetch(
    model: HubModel,
    cache_dir: Path,
    progress: Progress,
    *,
    tokenizer: bool = True,
    check: Check = lambda *files: len(files),
) -> Path:
    """Return the folder with a model's files; download them unless they are complete.

    Args:
        model: the model.
        cache_dir: downloads are kept below `hub/` in it.
        progress: called during a download.
        tokenizer: whether there must be one; a draft head has none.
        check: called during a download of a model, before weights that need a conversion.

    Raises:
        ModelError: the download failed; the message says why and what to do.
    """
    folder = model.folder(cache_dir)
    if is_complete(folder, model):
        return folder
    offline = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if any(value.upper() in ("1", "ON", "YES", "TRUE") for value in offline):
        raise ModelError(
            f"{model} is not, or not all, in {folder}, and HF_HUB_OFFLINE forbids a download: "
            "unset HF_HUB_OFFLINE for one start, or set SPECOPS_TARGET to a local folder"
        )
    # Compose passes unset variables on as empty ones, which huggingface_hub takes for an address.
    if not os.environ.get("HF_ENDPOINT", "").strip():
        os.environ.pop("HF_ENDPOINT", None)
    from specops.models import download  # noqa: PLC0415 - heavy, and only needed here

    try:
        with locked(folder):
            if not is_complete(folder, model):  # another process may have downloaded it meanwhile
                download.snapshot(model, folder, progress, tokenizer=tokenizer, check=check)
    except OSError as error:
        raise ModelError(
            f"{folder} cannot be written ({error.strerror}): set SPECOPS_CACHE_DIR to a writable "
            "folder"
        ) from error
    return folder


# -- the choice ------------------------------------------------------------------------------------


def _source(setting: str, preset: str, models_dir: Path) -> Source:
    """Return the given model, or the preset's: a path that exists, a name on the hub, or a path."""
    if setting:
        for path in (Path(setting), models_dir / setting):
            if path.exists():
                return path
    elif preset.startswith(_BUNDLED):
        return models_dir / preset
    elif preset.startswith(_FETCHED):
        return in_environment(preset)
    return HubModel.parse(setting or preset) or Path(setting)


def _name(source: Source) -> str:
    if isinstance(source, HubModel):
        return source.name
    return source.stem if source.is_file() else source.resolve().name


def _quant(source: Source | None, setting: str, preset: str, variable: str) -> str:
    """Return the full name of a source's weights."""
    own = source.gguf if isinstance(source, HubModel) else source is not None and is_gguf(source)
    if not own:
        parsed = WeightsName.parse(setting or preset)
        return parsed.full if parsed else setting or preset
    if setting:
        raise ConfigError(
            f"{variable} is {setting}, but {source} is a GGUF, which keeps its own weights: "
            f"leave {variable} empty"
        )
    return OWN_WEIGHTS


# -- downloads and conversions ---------------------------------------------------------------------


def _conversion(
    source: Source,
    path: Path,
    quant: str,
    *,
    cache_dir: Path,
    convert: Callable[[Parts, Path, str, int], None],
    report: Callable[[str], None],
    tokenizer: bool = True,
    depends_on: tuple[Path, ...] = (),
) -> Path:
    """Return the folder of a checkpoint's conversion; make it if need be.

    Args:
        source: the checkpoint.
        path: where it is.
        quant: the kind of weights.
        cache_dir: the folder for conversions.
        convert: makes the conversion, see `conversions.Convert`, of the checkpoint's files.
        report: see `converted`.
        tokenizer: whether there must be one.
        depends_on: another model's files on which the conversion also depends.

    Raises:
        ModelError: a part of the checkpoint is missing or cannot be read, or the folder cannot be
            written.
    """
    try:
        parts = replace(parts_of(path, tokenizer=tokenizer), depends_on=depends_on)
        return converted(
            cache_dir / "converted",
            path,
            parts,
            quant,
            name=_name(source),
            check=partial(_check if tokenizer else _pass, str(path), parts.config),
            convert=partial(convert, parts),
            report=report,
        )
    except OSError as error:
        if error.errno == errno.EACCES and Path(error.filename or "").is_relative_to(path):
            raise ModelError(
                f"the user of this process ({os.getuid()}) cannot read {error.filename}: run "
                f"`chmod -R a+rX {path}`, on the host if this is a container"
            ) from error
        raise ModelError(
            f"{path} cannot be converted ({error}): set SPECOPS_CACHE_DIR to a writable folder "
            "with room for the converted weights"
        ) from error


def _check(source: str, *files: Path) -> int:
    """Raise ModelError if a model cannot be converted, as far as its files tell; see `Check`."""
    lines: list[str] = []
    try:
        run_module("specops.models.convert.check", *map(str, files), tell=lines.append)
    except ChildError as error:
        raise ModelError(f"{source} cannot be converted: {error}") from error
    return int(lines[-1])


def _check_draft(source: str, *files: Path) -> int:
    """Check a draft model like any model; a draft head is judged by its own converter."""
    if files[0].name == CONFIG and is_head_checkpoint(files[0].parent):
        return len(files)
    return _check(source, *files)


def _pass(source: str, *files: Path) -> int:
    """What is converted in another way is checked there."""
    return len(files)


def _convert(
    path: Path,
    parts: Parts,
    folder: Path,
    quant: str,
    digest: str,
    *,
    lock: int,
    tell: Callable[[str], None],
) -> None:
    """Run the converter; before it, if need be, bring a copy of the checkpoint into its layout.

    The copy has everything except the weights, which are never copied.

    Raises:
        ModelError: the checkpoint cannot be converted; the message is the process's.
    """
    checkpoint = [str(path)]
    copy = folder.with_name(f".{folder.name}.layout")
    options = ("--quant", quant, "--source-digest", digest, "--in-place")
    try:
        if not parts.in_order:
            run_module("specops.models.layout", str(path), str(copy), lock=lock)
            weights = parts.state_dicts or (path,)
            checkpoint = [*(f"--weights={file}" for file in weights), str(copy)]
        module = "specops.models.convert.__main__"
        run_module(module, *checkpoint, str(folder), *options, lock=lock, tell=tell)
    except ChildError as error:
        said = str(error)
        if os.strerror(errno.ENOSPC) in said:
            said += "; set SPECOPS_CACHE_DIR to a folder with room for the converted weights"
        raise ModelError(f"{path} cannot be converted: {said}") from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _percents(work: str, report: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that reports the converter's percentages and the minutes left.

    These follow from how fast the percentages come: what precedes the first one, such as making the
    tokenizer, says nothing of it.
    """
    due = every(_REPORT_SECONDS)
    first: tuple[float, int] | None = None

    def tell(line: str) -> None:
        nonlocal first
        if line.startswith(WARNING):
            log.warning("%s", line.removeprefix(WARNING))
        elif line.endswith(" %"):
            now, done = time.monotonic(), int(line.removesuffix(" %"))
            first = first or (now, done)
            if due():
                seconds, come = now - first[0], done - first[1]
                left = math.ceil(seconds * (100 - done) / come / 60) if come >= _FEW_PERCENT else 0
                report(f"{work}: {line}" + (f", about {left} min left" if left > 1 else ""))

    return tell
