"""The peers' model files: the same random checkpoint, in the form that each peer's users run."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.models import CACHE, BuildError, tinyllama_checkpoint, weights_digest
from bench.peers.environment import PINNED
from bench.tools.report import progress

_ROOT = Path(__file__).resolve().parents[2]
LLAMA_CPP, OPENVINO = "llama.cpp", "OpenVINO"
_WRITERS = {LLAMA_CPP: ("llama_model", "q4_0.gguf"), OPENVINO: ("openvino_model", "int4.xml")}
_TINYLLAMA = partial(tinyllama_checkpoint, dtype="float16")


def peer_models(
    python: Path, write_checkpoint: Callable[[Path], object] = _TINYLLAMA, cache: Path = CACHE
) -> dict[str, Path]:
    """Each peer's model file, made at the first call (a few minutes, 5 GB of disk for a while).

    `write_checkpoint` writes the Llama checkpoint in float16.
    """
    # Changes with the weights, with the code that writes the files and with the peers' versions.
    digest = hashlib.sha256("\n".join((weights_digest(), *PINNED)).encode())
    for writer, _ in _WRITERS.values():
        digest.update((Path(__file__).parent / f"{writer}.py").read_bytes())
    home = cache / f"peers-{digest.hexdigest()[:12]}"
    files = {peer: home / file for peer, (_, file) in _WRITERS.items()}
    if home.is_dir():
        return files
    for outdated in cache.glob("peers-*"):
        shutil.rmtree(outdated)
    part = home.with_suffix(".part")
    checkpoint = part / "checkpoint"
    progress(f"writing the random checkpoint once more, for the peers, to {checkpoint}")
    part.mkdir(parents=True)
    write_checkpoint(checkpoint)
    for peer, (writer, file) in _WRITERS.items():
        progress(f"making {peer}'s model of it")
        run_module(python, writer, checkpoint, part / file)
    shutil.rmtree(checkpoint)
    part.rename(home)
    return files


def run_module(python: Path, module: str, *files: Path) -> None:
    """Run a module of this package in an environment.

    Raises:
        BuildError: it failed; the message has its last output.
    """
    command = [str(python), "-m", f"bench.peers.{module}", *map(str, files)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{command[2]} failed: {done.stderr.strip()[-500:]}")
