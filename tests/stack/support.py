"""Where things are and how to run them, for the tests of the stack."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.loopback import HOST, free_port

ROOT = Path(__file__).resolve().parents[2]
VENV_BIN = Path(sys.executable).parent
START_SECONDS = 300.0  # a first start converts the weights

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


@dataclass
class MadeUp:
    """A running `make up` without Docker, with ports and a state folder of its own."""

    process: subprocess.Popen[bytes]
    output: Path
    api: str
    prometheus: str
    env: dict[str, str]

    def wait(
        self, what: str, condition: Callable[[], bool], seconds: float = START_SECONDS
    ) -> None:
        """Poll until `condition` holds; fail where the stack ends or time runs out."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"waited in vain: {what}\n{self.output.read_text()}")
            time.sleep(0.1)


@contextmanager
def made_up(folder: Path, *arguments: str, **variables: str) -> Iterator[MadeUp]:
    """Bring the demo pair up, natively; end it with `scripts/down`, and see that all went well."""
    ports = {"SPECOPS_PORT": str(free_port()), "PROMETHEUS_PORT": str(free_port())}
    env = {**ports, "SPECOPS_MODEL": "demo", "NATIVE_STATE": str(folder / "state"), **variables}
    output = folder / "up.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            ["make", "up", *arguments, "ARGS=--native"],
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    running = MadeUp(process, output, *(f"http://{HOST}:{port}" for port in ports.values()), env)
    try:
        running.wait("Ready", lambda: "Ready." in output.read_text())
        yield running
    finally:
        run("scripts/down", env=env)
        process.wait(60)
    assert process.returncode == 0, output.read_text()
