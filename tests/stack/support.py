"""Where things are and how to run them, for the tests of the stack."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.loopback import HOST, free_port
from tests.waiting import PATIENCE, started, wait

ROOT = Path(__file__).resolve().parents[2]
VENV_BIN = Path(sys.executable).parent
START_SECONDS = 300.0  # a first start converts the weights

Finished = subprocess.CompletedProcess[str]


def read_yaml(path: str) -> Any:
    """A YAML file of the repository."""
    return yaml.safe_load((ROOT / path).read_text())


def tool(name: str) -> str | None:
    """The path of a program on the PATH or in the virtual environment; None if it is missing."""
    return shutil.which(name) or shutil.which(name, path=str(VENV_BIN))


def run(*command: object, env: Mapping[str, str] | None = None, timeout: float = 120) -> Finished:
    """Run a command in the repository, with `env` added; the caller checks its exit status."""
    return subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def succeed(*command: object, **options: Any) -> str:
    """Run a command that must end with status 0; returns its stdout."""
    finished = run(*command, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def write_programs(folder: Path, **texts: str) -> None:
    """Write executable files into a folder."""
    for name, text in texts.items():
        (file := folder / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)


def compose_command() -> tuple[str, ...] | None:
    """The command of a Docker Compose 2 or newer, plugin or not; None if it is missing."""
    for name, *rest in (("docker", "compose"), ("docker-compose",)):
        if path := tool(name):
            version = run(path, *rest, "version", "--short")
            found = re.match(r"v?(\d+)\.", version.stdout)
            if version.returncode == 0 and found and int(found[1]) >= 2:
                return (path, *rest)
    return None


def promtool(*arguments: object) -> str:
    """Run Prometheus' checker, which must accept what it is given; skips if it is missing."""
    if tool("promtool") is None:
        pytest.skip("no promtool here")
    return succeed("promtool", *arguments)


def prometheus_values(url: str, promql: str, at: float | None = None) -> list[float]:
    """The values of an expression, now or at a time, through Prometheus' HTTP API."""
    query = {"query": promql} if at is None else {"query": promql, "time": str(at)}
    body = httpx.get(f"{url}/api/v1/query", params=query, timeout=PATIENCE).json()
    assert body["status"] == "success", body
    return [float(series["value"][1]) for series in body["data"]["result"]]


@dataclass
class NativeStack:
    """A running `make up` without Docker, with ports and a state folder of its own."""

    process: subprocess.Popen[bytes]
    output: Path
    api: str
    prometheus: str
    env: dict[str, str]

    def wait(
        self, what: str, condition: Callable[[], bool], seconds: float = START_SECONDS
    ) -> None:
        """Poll until `condition` holds; fail if the stack ends or time runs out."""

        def holds() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return condition()

        wait(what, holds, seconds)

    def query(self, promql: str, at: float | None = None) -> list[float]:
        return prometheus_values(self.prometheus, promql, at)


@contextmanager
def native_stack(folder: Path, *arguments: str, **variables: str) -> Iterator[NativeStack]:
    """Start the default model natively; end it with `scripts/down`, and check its exit status."""
    ports = {"SPECOPS_PORT": str(free_port()), "PROMETHEUS_PORT": str(free_port())}
    env = {**ports, "SPECOPS_MODEL": "", "NATIVE_STATE": str(folder / "state"), **variables}
    output, command = folder / "up.log", ["make", "up", "ARGS=--native", *arguments]
    urls = (f"http://{HOST}:{port}" for port in ports.values())
    rest = {"env": {**os.environ, **env}, "cwd": ROOT, "seconds": START_SECONDS}
    with started(command, output, lambda: "Ready." in output.read_text(), **rest) as process:
        try:
            yield NativeStack(process, output, *urls, env)
        finally:
            run("scripts/down", env=env)
            process.wait(PATIENCE)
    assert process.returncode == 0, output.read_text()
