"""`make up` on an engine: it shows the model on its way, and ends at once where that failed."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.http.test_healthcheck import Health, answering, state
from tests.stack.support import ROOT, Finished, run

# Writes its arguments down; in the container it runs the command, here on this machine.
DOCKER = """\
#!/bin/sh
echo "${{COMPOSE_FILE:+$COMPOSE_FILE }}$*" >>{calls}
case "$*" in
"compose exec -T api python "*) shift 5; exec {python} "$@" ;;
"compose logs "*) echo "the service's last words" ;;
"compose port "*) echo "127.0.0.1:$4" ;;
esac
"""


def up(tmp_path: Path, *answers: Health, replicas: str = "") -> tuple[Finished, list[str]]:
    """What `scripts/up` does beside a service that answers so, and what it asks of Docker."""
    calls = tmp_path / "calls"
    docker = tmp_path / "docker"
    docker.write_text(DOCKER.format(calls=calls, python=shlex.quote(sys.executable)))
    docker.chmod(0o755)
    with answering(*answers) as port:
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "api"),
            "SPECOPS_PORT": str(port),
            "REPLICAS": replicas,
        }
        return run("scripts/up", env=env), calls.read_text().splitlines()


def test_progress_is_shown_until_everything_runs(tmp_path: Path) -> None:
    steps = [state("downloading", "1 of 2 MB"), state("converting", "50 %"), state("ready")]
    finished, calls = up(tmp_path, *steps)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("downloading 1 of 2 MB\nconverting 50 %\n")
    assert "http://127.0.0.1:8000" in finished.stdout
    ups = [call for call in calls if call.startswith("compose up")]
    assert ups == ["compose up --build --detach", "compose up --detach --wait"]


def test_several_replicas_take_the_gateways_file(tmp_path: Path) -> None:
    finished, calls = up(tmp_path, state("ready"), replicas="3")
    assert finished.returncode == 0, finished.stderr
    files = "compose.yaml:compose.scale.yaml"
    assert f"{files} compose up --build --detach" in calls
    assert f"{files} compose port gateway 8000" in calls


def test_a_model_that_failed_ends_it_with_the_reason(tmp_path: Path) -> None:
    finished, calls = up(tmp_path, state("failed", error="the hub has no a/b (404)"))
    assert finished.returncode == 1
    assert "failed: the hub has no a/b (404)" in finished.stderr
    assert "the service's last words" in finished.stderr
    assert "compose up --detach --wait" not in calls


@pytest.mark.parametrize("file", ["compose.yaml", "api/Dockerfile"])
def test_the_same_check_runs_wherever_the_image_does(file: str) -> None:
    assert "specops.http.healthcheck" in (ROOT / file).read_text()
