"""Installs the peers' libraries once, in pinned versions, in an environment apart from ours.

llama-cpp-python comes as source and is compiled for this processor, as it is for its users. This
takes about ten minutes on two cores.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.models import CACHE
from bench.tools.report import progress

HOME = CACHE / "environment"
PINNED = (
    "gguf==0.19.0",
    "llama-cpp-python==0.3.36",
    "nncf==3.4.0",
    "numpy==2.4.6",
    "openvino==2026.4.1",
    "openvino-genai==2026.4.1.0",
    "safetensors==0.8.0",
)
# The build omits tools and the vision library; it has the default kernels.
_BUILD = (
    "-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
    "-DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF"
)
_SHOWN_LINES = 6


class InstallError(RuntimeError):
    """The peers' libraries cannot be installed here; the message says why."""


def python(home: Path = HOME) -> Path:
    """The environment's interpreter."""
    return home / "venv" / "bin" / "python"


def installed(home: Path = HOME, packages: tuple[str, ...] = PINNED) -> bool:
    """Whether the environment has all of these packages."""
    mark = home / "venv" / "installed.txt"
    return mark.is_file() and mark.read_text(encoding="utf-8").split() == list(packages)


def install(home: Path = HOME, packages: tuple[str, ...] = PINNED) -> Path:
    """Create the environment in `home` unless it exists, and return its interpreter.

    Raises:
        InstallError: there is no network, or no C++ compiler.
    """
    if installed(home, packages):
        return python(home)
    venv = home / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    progress(f"installing {', '.join(packages)} into {venv}; llama.cpp takes minutes to compile")
    _run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    wheels = home / "wheels"  # keeps compiled wheels for the next installation
    wheels.mkdir(exist_ok=True)
    # A wheel in pip's cache may have been compiled for other processors, with other options.
    pip = [sys.executable, "-m", "pip", "--no-cache-dir", "--python", str(python(home))]
    _run([*pip, "wheel", "--find-links", str(wheels), "--wheel-dir", str(wheels), *packages])
    _run([*pip, "install", "--no-index", "--find-links", str(wheels), *packages])
    (venv / "installed.txt").write_text("\n".join(packages) + "\n", encoding="utf-8")
    return python(home)


def _run(command: list[str]) -> None:
    flags = f"{_BUILD} {os.environ.get('CMAKE_ARGS', '')}".strip()
    environment = {**os.environ, "CMAKE_ARGS": flags}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        said = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-_SHOWN_LINES:])
        raise InstallError(
            "the peers cannot be installed, so there is nothing to compare with "
            f"(installing needs a network and a C++ compiler):\n  {said}"
        )
