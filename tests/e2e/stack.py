"""The project in compose.yaml, started beside other projects on the engine."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import stand_ins
from tests.e2e.engine import COMMAND_SECONDS, Engine
from tests.loopback import free_port
from tests.stack import forwarding
from tests.stack.support import ROOT, Finished, prometheus_values, read_yaml, run

SERVICES: dict[str, dict[str, Any]] = read_yaml("compose.yaml")["services"]
GRAFANA_PASSWORD = "swordfish"  # noqa: S105
UP = ("up", "--detach", "--wait", "--wait-timeout", "180")
PORTS = {
    "api": "SPECOPS_PORT",
    "prometheus": "PROMETHEUS_PORT",
    "grafana": "GRAFANA_PORT",
    "locust": "LOCUST_PORT",
}


@dataclass(frozen=True)
class Stack:
    """The services, under a project name of their own and on free ports.

    Attributes:
        services: those of the default start and of the load test, with an available image.
        files: the Compose files; the override is added.
    """

    engine: Engine
    override: Path
    env: dict[str, str]
    services: tuple[str, ...]
    project: str = stand_ins.PREFIX
    files: tuple[str, ...] = ("compose.yaml",)
    profile: str = "load"

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self.env[PORTS[service]]}"

    def compose(self, *arguments: object, check: bool = True) -> Finished:
        """Run Compose on the project; a failure shows the services' logs."""
        files = [ROOT / name for name in self.files] + [self.override]
        finished = run(
            *self.engine.compose,
            *("--project-name", self.project, "--project-directory", ROOT),
            *(part for file in files for part in ("--file", file)),
            *("--profile", self.profile, *arguments),
            env=self.env,
            timeout=COMMAND_SECONDS,
        )
        if check and finished.returncode:
            logs = self.compose("logs", "--no-color", "--tail", "40", check=False)
            pytest.fail(f"{arguments}: {finished.stdout}{finished.stderr}\n{logs.stdout}")
        return finished

    def up(self) -> None:
        """Start what a plain `docker compose up --detach --wait` starts, and wait for it."""
        self.compose(*UP, *(set(self.services) - {"locust"}))

    def remove(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--all", "--quiet", service).stdout.split()

    def inspect(self, service: str, template: str) -> str:
        (container,) = self.containers(service)
        return self.engine.docker("inspect", "--format", template, container).stdout.strip()

    def healthy(self, service: str) -> bool:
        return self.inspect(service, "{{.State.Health.Status}}") == "healthy"

    def execute(self, service: str, *command: str) -> Finished:
        """Run a command in the first container of a service; the caller checks its status."""
        return self.engine.docker("exec", self.containers(service)[0], *command, check=False)

    def read(self, service: str, path: str) -> str | None:
        """A file's text as the container sees it; None if it does not exist."""
        found = self.execute(service, "cat", path)
        return found.stdout if found.returncode == 0 else None

    def logged(self, service: str) -> list[dict[str, Any]]:
        """The JSON lines in a service's log, of all runs of its container."""
        written = self.engine.docker("logs", self.containers(service)[0])
        lines = (written.stdout + written.stderr).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def seconds_to_ready(self) -> float:
        """From the start of the API's container to its model being ready, by their own clocks."""
        started = datetime.fromisoformat(self.inspect("api", "{{.State.StartedAt}}"))
        lines = self.logged("api")
        ready = [line["time"] for line in lines if line["message"].startswith("model is ready")]
        return (datetime.fromisoformat(ready[-1]) - started).total_seconds()

    def query(self, promql: str) -> list[float]:
        return prometheus_values(self.url("prometheus"), promql)


@contextmanager
def running_stack(engine: Engine, folder: Path) -> Iterator[Stack]:
    """Build and start the stack; remove all of it at the end."""
    # Every setting is given, so that neither the environment nor .env changes what is tested.
    # An empty setting means its default. Only the folder of the models comes from outside.
    settings = re.findall(r"^#?(\w+)=", (ROOT / ".env.example").read_text(), flags=re.MULTILINE)
    env = {
        **dict.fromkeys(settings, ""),
        **engine.env,
        **{name: str(free_port()) for name in PORTS.values()},
        **forwarding.ENVIRONMENT,  # as in a Codespace; everything works without its proxy, too
        "GRAFANA_ADMIN_PASSWORD": GRAFANA_PASSWORD,
        "SPECOPS_MODEL": "demo",  # small and quick, whether the chat model is available or not
        "SPECOPS_MODELS_DIR": os.environ.get("SPECOPS_MODELS_DIR", ""),
    }
    changes = {
        service: {"image": f"{stand_ins.PREFIX}/{service}"}
        for service, content in SERVICES.items()
        if "build" in content
    }
    services = tuple(
        name for name, content in SERVICES.items() if content.get("profiles", ["load"]) == ["load"]
    )
    dockerfile = (ROOT / "api" / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)", dockerfile, flags=re.MULTILINE)
    if not stand_ins.is_available(engine, base):
        stand_ins.make_python(engine)
        env["PYTHON_IMAGE"] = stand_ins.PYTHON
    if not stand_ins.is_available(engine, SERVICES["prometheus"]["image"]):
        stand_ins.make_prometheus(engine)
        changes["prometheus"] = {"image": stand_ins.PROMETHEUS}
    if not stand_ins.is_available(engine, SERVICES["grafana"]["image"]):
        services = tuple(service for service in services if service != "grafana")
    override = folder / "override.yaml"
    override.write_text(yaml.safe_dump({"services": changes}))
    stack = Stack(engine, override, env, services)
    try:
        stack.remove()  # of a run that was killed
        stack.compose("build")
        stack.up()
        yield stack
    finally:
        stack.remove()
        if not engine.address:  # the end of one of our own removes all
            ours = ("--quiet", "--filter", f"reference={stand_ins.PREFIX}/*")
            images = engine.docker("images", *ours, check=False).stdout.split()
            engine.docker("image", "rm", "--force", *images, check=False)
