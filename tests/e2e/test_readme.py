"""The README's commands, typed as a newcomer does: the path with Docker, from start to end."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e import stand_ins
from tests.e2e.conftest import Note
from tests.e2e.stack import SERVICES, Stack
from tests.stack.support import ROOT, run, succeed, tool
from tests.waiting import PATIENCE, answers, wait

pytestmark = pytest.mark.e2e

README = (ROOT / "README.md").read_text()
COMMANDS: list[str] = re.findall(r"^```bash\n(.*?)\n```", README, flags=re.DOTALL | re.MULTILINE)
COMMAND_SECONDS = 600
SHORTER = " ARGS='--time-scale 0.1'"  # instead of a load of two minutes


@pytest.fixture(scope="module")
def env(started: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `docker compose` means the stack of these tests."""
    folder = tmp_path_factory.mktemp("readme")
    files = [ROOT / "compose.yaml", started.override]
    if "grafana" not in started.services:
        files.append(folder / "without-grafana.yaml")
        files[-1].write_text(yaml.safe_dump({"services": {"grafana": {"profiles": ["never"]}}}))
    found = {
        **started.env,
        "SPECOPS_MODEL": "",
        "CODESPACE_NAME": "",  # addresses as on a machine of one's own
        "COMPOSE_FILE": ":".join(map(str, files)),
        "COMPOSE_PROJECT_NAME": stand_ins.PREFIX,
    }
    if len(started.engine.compose) == 1:  # not a plugin: let the client find it as one
        plugin = folder / "docker" / "cli-plugins" / "docker-compose"
        plugin.parent.mkdir(parents=True)
        plugin.symlink_to(started.engine.compose[0])
        settings = Path.home() / ".docker" / "config.json"
        if settings.exists():
            (folder / "docker" / "config.json").symlink_to(settings)
        found["DOCKER_CONFIG"] = str(folder / "docker")
    return found


def type_in(command: str, env: dict[str, str]) -> str:
    """Run a command as it is written; returns its output."""
    return succeed("bash", "-c", command, env=env, timeout=COMMAND_SECONDS)


def written(beginning: str) -> str:
    """The first of the README's commands with this beginning."""
    return next(command for command in COMMANDS if command.startswith(beginning))


def test_the_readmes_commands_do_what_it_says(
    started: Stack, env: dict[str, str], note: Note
) -> None:
    started.compose("down")
    port = started.env["SPECOPS_PORT"]

    up = type_in(written("make up"), env)
    assert re.search(rf"API +http://127\.0\.0\.1:{port}\n", up)
    assert all(map(started.healthy, set(started.services) - {"locust"}))

    if tool("curl"):
        ask = written("curl").replace(":8000", f":{port}")
        answer = json.loads(type_in(ask, env))
        promised = {"generated_text", "tokens_per_second", "avg_tokens_per_jump", "latency_ms"}
        assert promised <= set(answer)
        (model,) = httpx.get(f"{started.url('api')}/v1/models", timeout=PATIENCE).json()["data"]
        if model["id"] == "smollm2":
            assert "Paris" in answer["generated_text"]
        else:
            assert "there is no chat model" in up
        note(f"README: {model['id']} says {answer['generated_text']!r}")
        note(f"README: ready {started.seconds_to_ready():.1f} s after the start, nothing prepared")

    # Its status may be that of a missed gate: the speed of this machine does not matter here.
    load = run("bash", "-c", written("make load") + SHORTER, env=env, timeout=COMMAND_SECONDS)
    assert "failed; " in load.stdout, load.stdout + load.stderr
    (line,) = re.findall(r"^\d+ answered, .* failed; .*$", load.stdout, flags=re.MULTILINE)
    (page,) = re.findall(r"^Report: (.*\.html)$", load.stdout, flags=re.MULTILINE)
    assert (ROOT / page).is_file()
    assert " 0 failed" in line

    # "or": Locust's page out of a container, until Ctrl-C.
    (page,) = re.findall(r"`(docker compose .* locust)`", README)
    with subprocess.Popen(
        ["bash", "-c", f"exec {page}"],
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    ) as locust:
        try:
            wait("Locust's page", lambda: answers(started.url("locust")), COMMAND_SECONDS)
            os.killpg(locust.pid, signal.SIGINT)
            locust.wait(PATIENCE)
        finally:
            if locust.poll() is None:
                os.killpg(locust.pid, signal.SIGKILL)

    type_in("make down", env)
    label = f"label=com.docker.compose.project={stand_ins.PREFIX}"
    assert started.engine.docker("ps", "--all", "--quiet", "--filter", label).stdout == ""
    note(f"README: make up, curl, make load, make down as written; the load: {line.strip()}")


def test_the_readme_names_the_ports_that_are_published() -> None:
    published = re.findall(r"127\.0\.0\.1:(\d+)", README)
    ports = "".join(port for service in SERVICES.values() for port in service["ports"])
    assert all(f":-{port}" in ports for port in set(published))
