"""The environment of the peers' libraries: pinned, made once, apart from ours.

llama-cpp-python comes as source and is compiled for this very processor, as it is for its users;
that takes some ten minutes on two cores and happens once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".cache" / "peers"
PINNED = (
    "gguf==0.19.0",
    "llama-cpp-python==0.3.36",
    "nncf==3.4.0",
    "numpy==2.4.6",
    "openvino==2026.4.1",
    "openvino-genai==2026.4.1.0",
    "safetensors==0.8.0",
)
# Tools and the vision library are left out of the build; the kernels are as by default.
_BUILD = (
    "-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
    "-DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF"
)
_MARK = "installed.txt"
_SHOWN_LINES = 6

Progress = Callable[[str], None]


class InstallError(RuntimeError):
    """The peers' libraries cannot be had here; the message says why."""


def python(home: Path = HOME) -> Path:
    """The environment's interpreter."""
    return home / "venv" / "bin" / "python"


def installed(home: Path = HOME, packages: tuple[str, ...] = PINNED) -> bool:
    """Whether the environment is complete and of these packages."""
    mark = home / "venv" / _MARK
    return mark.is_file() and mark.read_text(encoding="utf-8").split() == list(packages)


def install(progress: Progress, home: Path = HOME, packages: tuple[str, ...] = PINNED) -> Path:
    """Make the environment in `home` unless it is there; returns its interpreter."""
    if installed(home, packages):
        return python(home)
    venv = home / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    progress(f"installing {', '.join(packages)} into {venv}; llama.cpp takes minutes to compile")
    _run([sys.executable, "-m", "venv", str(venv)])
    wheels = home / "wheels"  # a wheel that was compiled here before need not be again
    wheels.mkdir(exist_ok=True)
    pip = [str(python(home)), "-m", "pip"]
    _run([*pip, "wheel", "--find-links", str(wheels), "--wheel-dir", str(wheels), *packages])
    _run([*pip, "install", "--no-index", "--find-links", str(wheels), *packages])
    (venv / _MARK).write_text("\n".join(packages) + "\n", encoding="utf-8")
    return python(home)


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CMAKE_ARGS": f"{_BUILD} {os.environ.get('CMAKE_ARGS', '')}".strip()},
    )
    if done.returncode:
        said = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-_SHOWN_LINES:])
        raise InstallError(
            "the peers cannot be installed, and without them there is nothing to compare with "
            f"(a network and a C++ compiler are needed):\n  {said}"
        )
