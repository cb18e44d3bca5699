"""Where things are and how to run them, for the tests of the stack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV_BIN = Path(sys.executable).parent

Finished = subprocess.CompletedProcess[str]


def tool(name: str) -> str | None:
    """A program on the PATH or in the virtual environment; None where there is none."""
    return shutil.which(name) or shutil.which(name, path=str(VENV_BIN))


def run(*command: object, env: Mapping[str, str] | None = None, timeout: float = 120) -> Finished:
    """Run a command in the repository with `env` over the environment; its status is not judged."""
    return subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
