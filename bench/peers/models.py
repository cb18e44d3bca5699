"""The compared models: one random checkpoint in the kinds of weights people run, and a real file.

llama.cpp's quantizer writes every GGUF, and llama.cpp and we read the same file. OpenVINO has one
model of the checkpoint, NNCF's int4, which is compared with our int4 and with every GGUF.
"""

import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gguf

from bench.models import (
    BenchModel,
    BuildError,
    current_folder,
    plain,
    tinyllama,
    tinyllama_checkpoint,
)
from bench.peers.environment import PINNED, install
from bench.tools.report import progress
from specops.presets import chat_model
from specops.system.folders import atomic_folder
from tests.models.convert.gguf.files import write_gguf

_ROOT = Path(__file__).resolve().parents[2]
OURS, LLAMA_CPP, OPENVINO = "specops", "llama.cpp", "OpenVINO"
TYPES = ("Q4_0", "Q4_K_M", "IQ4_XS", "Q5_K_M")
INT4 = "int4-128"  # our export, the counterpart of OpenVINO's
_TINYLLAMA = partial(tinyllama_checkpoint, dtype="float16")
_WRITERS = ("llama_model", "openvino_model")  # the modules that write the files


class Lineup(NamedTuple):
    """One kind of weights: our model, and the file of each peer."""

    weights: str
    model: BenchModel
    files: dict[str, Path]

    @property
    def sides(self) -> dict[str, str]:
        """The name of each engine's process. Lineups share a peer's process for the same file."""
        others = {peer: f"{peer} {file.stem}" for peer, file in self.files.items()}
        return {OURS: f"{OURS} {self.weights}", **others}


def lineups(cache: Path) -> tuple[Path, list[Lineup]]:
    """The peers' interpreter and all compared models, made and converted unless they exist."""
    python = install(cache / "environment")
    files = peer_models(python, cache=cache)
    openvino = {OPENVINO: files[OPENVINO]}
    found = [Lineup(INT4, tinyllama(cache), {LLAMA_CPP: files["Q4_0"], **openvino})]
    for kind in TYPES:
        model = BenchModel(kind, kind, plain(files[kind], files[kind].parent))
        found.append(Lineup(kind, model, {LLAMA_CPP: files[kind], **openvino}))
    if (real := chat_model()).is_file():
        model = BenchModel(real.stem, real.stem, plain(real, files["Q4_0"].parent))
        found.append(Lineup(real.stem, model, {LLAMA_CPP: real}))
    for lineup in found:
        progress(f"preparing {lineup.weights}")
        lineup.model.folder()
    return python, found


def peer_models(
    python: Path, write_checkpoint: Callable[[Path], object] = _TINYLLAMA, *, cache: Path
) -> dict[str, Path]:
    """A GGUF of every type in `TYPES`, and OpenVINO's model under the key `OPENVINO`.

    The first call makes them, which takes minutes and 7 GB of disk for a while.

    Args:
        python: the peers' interpreter.
        write_checkpoint: writes the Llama checkpoint in float16.
        cache: keeps the files.
    """
    writers = (Path(__file__).parent / f"{writer}.py" for writer in _WRITERS)
    home = current_folder(cache, "peers", writers, *PINNED, *TYPES)
    files = {kind: home / f"{kind}.gguf" for kind in TYPES} | {OPENVINO: home / "int4.xml"}
    if home.is_dir():
        return files
    with atomic_folder(home) as part:
        checkpoint, whole = part / "checkpoint", part / "float16.gguf"
        progress(f"writing the random checkpoint once more, for the peers, to {checkpoint}")
        write_checkpoint(checkpoint)
        progress(f"quantizing it with llama.cpp: {', '.join(TYPES)}")
        write_gguf(checkpoint, whole, lambda name: gguf.GGMLQuantizationType.F16)
        run_module(python, "llama_model", whole, part, *TYPES)
        whole.unlink()
        progress("quantizing it with NNCF")
        run_module(python, "openvino_model", checkpoint, part / files[OPENVINO].name)
        shutil.rmtree(checkpoint)
    return files


def run_module(python: Path, module: str, *arguments: Path | str) -> None:
    """Run a module of this package in another environment.

    Args:
        python: the environment's interpreter.
        module: name of the module.
        arguments: its command line.

    Raises:
        BuildError: it failed; the message has its last output.
    """
    command = [str(python), "-m", f"bench.peers.{module}", *map(str, arguments)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{command[2]} failed: {done.stderr.strip()[-500:]}")
