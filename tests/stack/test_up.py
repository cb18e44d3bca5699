"""`make up` on an engine: it shows the model's progress, and ends at once if the model failed."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.http.test_healthcheck import Health, answering, state
from tests.stack.support import ROOT, Finished, run

# Writes its arguments down. Commands for the container run on this machine.
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
    """Run `scripts/up` beside a service with these answers; returns its calls of Docker, too."""
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


@pytest.mark.parametrize(
    ("replicas", "files", "door"),
    [("", "", "api"), ("3", "compose.yaml:compose.scale.yaml ", "gateway")],
)
def test_progress_is_shown_until_everything_runs(
    tmp_path: Path, replicas: str, files: str, door: str
) -> None:
    steps = [state("downloading", "1 of 2 MB"), state("converting", "50 %"), state("ready")]
    finished, calls = up(tmp_path, *steps, replicas=replicas)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("downloading 1 of 2 MB\nconverting 50 %\n")
    assert "http://127.0.0.1:8000" in finished.stdout
    ups = [call for call in calls if "compose up" in call]
    assert ups == [f"{files}compose up --build --detach", f"{files}compose up --detach --wait"]
    assert f"{files}compose port {door} 8000" in calls


def test_a_model_that_failed_ends_it_with_the_reason(tmp_path: Path) -> None:
    finished, calls = up(tmp_path, state("failed", error="the hub has no a/b (404)"))
    assert finished.returncode == 1
    assert "failed: the hub has no a/b (404)" in finished.stderr
    assert "the service's last words" in finished.stderr
    assert "compose up --detach --wait" not in calls


@pytest.mark.parametrize("file", ["compose.yaml", "api/Dockerfile"])
def test_the_same_check_runs_in_the_container(file: str) -> None:
    assert "specops.http.healthcheck" in (ROOT / file).read_text()
