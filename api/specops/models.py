"""From a model's name to folders with graphs: presets, bundled exports, conversions.

A conversion runs in a process of its own: its memory goes back when it ends, and the serving
process never imports the converter.
"""

from __future__ import annotations

import hashlib
import json
import subprocess  # nosec B404: runs only our own converter
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specops.config import ConfigError, Settings

MANIFEST = "specops.json"
_PRESETS = Path(__file__).with_name("presets.toml")
_DEFAULT_BLOCK = "-128"


class ModelError(RuntimeError):
    """A model that cannot be prepared; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """An exported model: a graph, a tokenizer, and what its manifest says of them."""

    path: Path
    name: str
    graph: Path
    quant: str
    vocab_size: int
    context_length: int
    parameters: int
    bos_token: int | None
    end_tokens: frozenset[int]

    @classmethod
    def read(cls, path: Path, name: str) -> ModelFolder:
        """Read a folder's manifest.

        Raises:
            ModelError: the manifest is missing or does not say what it must.
        """
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            return cls(
                path=path,
                name=name,
                graph=path / manifest["onnx_file"],
                quant=manifest["quantization"]["name"],
                vocab_size=manifest["vocab_size"],
                context_length=manifest["context_length"],
                parameters=manifest["num_parameters"],
                bos_token=manifest["bos_token_id"],
                end_tokens=frozenset(manifest["eos_token_ids"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{path / MANIFEST} cannot be used ({error!r}): export the model again"
            ) from error


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What to load: checkpoint or exported folders, and the weights they are wanted in."""

    name: str
    target: Path
    target_quant: str
    draft: Path | None
    draft_quant: str


def choose(settings: Settings) -> ModelChoice:
    """Apply the settings' overrides to their preset.

    Raises:
        ConfigError: there is no such preset.
    """
    presets = tomllib.loads(_PRESETS.read_text(encoding="utf-8"))
    preset = presets.get(settings.model)
    if preset is None:
        raise ConfigError(f"SPECOPS_MODEL takes one of {', '.join(presets)}, not {settings.model}")
    target = Path(settings.target or settings.models_dir / preset["target"])
    # A preset's draft fits the preset's target; another target needs to be given its own.
    bundled_draft = "" if settings.target else str(settings.models_dir / preset["draft"])
    draft = settings.draft or bundled_draft or "none"
    return ModelChoice(
        name=target.resolve().name if settings.target else settings.model,
        target=target,
        target_quant=_with_block(settings.quant or preset["quant"]),
        draft=None if draft == "none" else Path(draft),
        draft_quant=preset["draft_quant"],
    )


def prepare(
    source: Path, quant: str, *, name: str, cache_dir: Path, report: Callable[[str], None]
) -> ModelFolder:
    """Find a model's exported form, or make it.

    Args:
        source: an exported folder, or a checkpoint in the Hugging Face layout, which may carry
            exports in `onnx/<quant>`.
        quant: the weights wanted, such as `int8-128`; an exported folder keeps its own.
        name: the model's name in messages and metrics.
        cache_dir: where conversions are kept.
        report: told when a conversion begins.

    Raises:
        ModelError: the folder is missing or cannot be converted.
    """
    if (source / MANIFEST).is_file():
        return ModelFolder.read(source, name)
    bundled = source / "onnx" / quant
    if (bundled / MANIFEST).is_file():
        return ModelFolder.read(bundled, name)
    if not (source / "config.json").is_file():
        raise ModelError(f"{source} holds no model: neither {MANIFEST} nor config.json is there")
    converted = cache_dir / f"{source.resolve().name}-{_fingerprint(source)}-{quant}"
    if not (converted / MANIFEST).is_file():
        report(f"converting {source} to {quant}")
        _convert(source, converted, quant)
    return ModelFolder.read(converted, name)


def _with_block(quant: str) -> str:
    return quant + _DEFAULT_BLOCK if quant in ("int4", "int8") else quant


def _fingerprint(source: Path) -> str:
    """Changes whenever a file of the checkpoint does, without reading gigabytes."""
    digest = hashlib.sha256(str(source.resolve()).encode())
    for path in sorted(item for item in source.iterdir() if item.is_file()):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _convert(source: Path, destination: Path, quant: str) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "specops.export", str(source), str(destination)]
    done = subprocess.run(  # noqa: S603 # nosec B603: our own module, paths as arguments
        [*command, "--quant", quant], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ModelError(f"{source} cannot be converted: {done.stderr.strip()}")
