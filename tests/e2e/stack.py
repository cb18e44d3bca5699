"""The project in compose.yaml, brought up beside whatever else the engine runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e import stand_ins
from tests.e2e.engine import COMMAND_SECONDS, Engine
from tests.loopback import free_port
from tests.stack.support import ROOT, Finished, run
from tests.waiting import PATIENCE

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
DOCKERFILE = ROOT / "api" / "Dockerfile"
UP = ("up", "--detach", "--wait", "--wait-timeout", "180")
PORTS = {
    "api": "SPECOPS_PORT",
    "prometheus": "PROMETHEUS_PORT",
    "grafana": "GRAFANA_PORT",
    "locust": "LOCUST_PORT",
}


@dataclass(frozen=True)
class Stack:
    """The services, under a project name of their own and on free ports."""

    engine: Engine
    override: Path
    env: dict[str, str]
    services: tuple[str, ...]  # those whose image can be had; the load generator among them

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self.env[PORTS[service]]}"

    def compose(self, *arguments: object, check: bool = True) -> Finished:
        """Run Compose on compose.yaml and the override; a failure shows the services' logs."""
        finished = run(
            *self.engine.compose,
            *("--project-name", stand_ins.PREFIX, "--project-directory", ROOT),
            *("--file", ROOT / "compose.yaml", "--file", self.override, "--profile", "load"),
            *arguments,
            env=self.env,
            timeout=COMMAND_SECONDS,
        )
        if check and finished.returncode:
            logs = self.compose("logs", "--no-color", "--tail", "40", check=False)
            pytest.fail(f"{arguments}: {finished.stdout}{finished.stderr}\n{logs.stdout}")
        return finished

    def up(self) -> None:
        """Bring up what a plain `docker compose up --detach --wait` does, and wait as it does."""
        self.compose(*UP, *(set(self.services) - {"locust"}))

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).stdout.strip()

    def inspect(self, service: str, template: str) -> str:
        command = ("inspect", "--format", template, self.container(service))
        return self.engine.docker(*command).stdout.strip()

    def healthy(self, service: str) -> bool:
        return self.inspect(service, "{{.State.Health.Status}}") == "healthy"

    def read(self, service: str, path: str) -> str | None:
        """A file's text as the container sees it; None where there is no such file."""
        command = ("exec", self.container(service), "cat", path)
        found = self.engine.docker(*command, check=False)
        return found.stdout if found.returncode == 0 else None

    def logged(self, service: str) -> list[dict[str, Any]]:
        """The lines of a service that logs as JSON, of all runs of its container."""
        written = self.engine.docker("logs", self.container(service))
        lines = (written.stdout + written.stderr).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def seconds_to_ready(self) -> float:
        """From the start of the API's container to its model being ready, by their own clocks."""
        started = datetime.fromisoformat(self.inspect("api", "{{.State.StartedAt}}"))
        ready = [
            line for line in self.logged("api") if line["message"].startswith("model is ready")
        ]
        return (datetime.fromisoformat(ready[-1]["time"]) - started).total_seconds()

    def query(self, promql: str) -> list[float]:
        """The current values of an expression, through Prometheus' HTTP API."""
        address = f"{self.url('prometheus')}/api/v1/query"
        body = httpx.get(address, params={"query": promql}, timeout=PATIENCE).json()
        assert body["status"] == "success", body
        return [float(series["value"][1]) for series in body["data"]["result"]]


@contextmanager
def running_stack(engine: Engine, folder: Path) -> Iterator[Stack]:
    """Build and start the stack; whatever happens, remove all of it at the end."""
    # Every setting is given, so that neither the environment nor .env changes what is tested.
    # Empty means default. Where the models are may be said.
    settings = re.findall(r"^#?(\w+)=", (ROOT / ".env.example").read_text(), flags=re.MULTILINE)
    env = {
        **dict.fromkeys(settings, ""),
        **engine.env,
        **{name: str(free_port()) for name in PORTS.values()},
    }
    env["SPECOPS_MODEL"] = "demo"  # small and quick, whether the chat model can be had or not
    env["SPECOPS_MODELS_DIR"] = os.environ.get("SPECOPS_MODELS_DIR", "")
    changes: dict[str, Any] = {
        service: {"image": f"{stand_ins.PREFIX}/{service}"}
        for service, content in COMPOSE["services"].items()
        if "build" in content
    }
    services = tuple(COMPOSE["services"])
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)", DOCKERFILE.read_text(), flags=re.MULTILINE)
    if not stand_ins.can_be_had(engine, base):
        stand_ins.make_python(engine)
        env["PYTHON_IMAGE"] = stand_ins.PYTHON
    if not stand_ins.can_be_had(engine, COMPOSE["services"]["prometheus"]["image"]):
        stand_ins.make_prometheus(engine)
        changes["prometheus"] = {"image": stand_ins.PROMETHEUS}
    if not stand_ins.can_be_had(engine, COMPOSE["services"]["grafana"]["image"]):
        services = tuple(service for service in services if service != "grafana")
    override = folder / "override.yaml"
    override.write_text(yaml.safe_dump({"services": changes}))
    stack = Stack(engine, override, env, services)
    try:
        stack.compose("down", "--volumes", "--remove-orphans")  # of a run that was killed
        stack.compose("build")
        stack.up()
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)
        images = engine.docker(
            *("images", "--quiet", "--filter", f"reference={stand_ins.PREFIX}/*"), check=False
        ).stdout.split()
        engine.docker("image", "rm", "--force", *images, check=False)
