"""`make up` on an engine: it shows the model's progress, and ends at once if the model failed.

On an engine that cannot start a container with a memory limit it says why, and runs natively.
"""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.http.test_healthcheck import Health, answering, state
from tests.stack.support import ROOT, Finished, run, write_programs

# Writes its arguments down. Commands for the container run on this machine.
DOCKER = """\
#!/bin/sh
echo "${{COMPOSE_FILE:+$COMPOSE_FILE }}$*" >>{calls}
case "$*" in
"compose exec -T api python "*) shift 5; exec {python} "$@" ;;
"compose logs "*)
    echo "the service's last words"
    echo '{{"message": "memory: limit           1,000.0 MB  of an earlier start"}}'
    echo '{{"message": "memory: limit           4,295.0 MB  held by cgroup v2"}}'
    echo '{{"message": "memory: swap                0.0 MB  this machine has none"}}'
    ;;
"compose port "*) echo "127.0.0.1:$4" ;;
esac
"""


def up(tmp_path: Path, *answers: Health, replicas: str = "") -> tuple[Finished, list[str]]:
    """Run `scripts/up` beside a service with these answers; returns its calls of Docker, too."""
    calls = tmp_path / "calls"
    docker = DOCKER.format(calls=calls, python=shlex.quote(sys.executable))
    write_programs(tmp_path, docker=docker)
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
    [("", "", "api"), ("3", "compose.yaml:deploy/compose.scale.yaml ", "gateway")],
)
def test_progress_is_shown_until_everything_runs(
    tmp_path: Path, replicas: str, files: str, door: str
) -> None:
    steps = [state("downloading", "1 of 2 MB"), state("converting", "50 %"), state("ready")]
    finished, calls = up(tmp_path, *steps, replicas=replicas)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("downloading 1 of 2 MB\nconverting 50 %\n")
    assert "http://127.0.0.1:8000" in finished.stdout
    limits = [" ".join(line.split()) for line in finished.stdout.splitlines() if "memory:" in line]
    assert limits == [
        "memory: limit 4,295.0 MB held by cgroup v2",
        "memory: swap 0.0 MB this machine has none",
    ]
    started = [call for call in calls if re.search("compose (build|up)", call)]
    steps = ("build", "up --detach", "up --detach --wait")
    assert started == [f"{files}compose {step}" for step in steps]
    assert f"{files}compose port {door} 8000" in calls


@pytest.mark.parametrize("image", ["python:3.11-slim", "grafana/grafana:12.1.1"])
def test_an_image_that_cannot_be_pulled_is_named_with_the_ways_out(
    image: str, tmp_path: Path
) -> None:
    refusal = "toomanyrequests: You have reached your unauthenticated pull rate limit."
    docker = f"""#!/bin/sh
echo "$*" >>{tmp_path}/calls
case "$*" in
"compose config") echo "        PYTHON_IMAGE: python:3.11-slim" ;;
"compose config --images") printf '%s\\n' specops-api:0.1.0 grafana/grafana:12.1.1 ;;
"image inspect "*) exit 1 ;;
"pull {image}") echo "Error response from daemon: {refusal}" >&2; exit 1 ;;
"pull "*) echo "Status: Downloaded" ;;
esac
"""
    write_programs(tmp_path, docker=docker)
    finished = run("scripts/up", env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "REPLICAS": "1"})
    assert finished.returncode == 1
    said = " ".join(finished.stderr.split())
    assert said.startswith(f"The image {image} cannot be pulled ({refusal}): run `make up` again ")
    assert "`make up ARGS=--native`" in said
    assert "compose build" not in (tmp_path / "calls").read_text()


def test_a_model_that_failed_ends_it_with_the_reason(tmp_path: Path) -> None:
    finished, calls = up(tmp_path, state("failed", error="the hub has no a/b (404)"))
    assert finished.returncode == 1
    assert "failed: the hub has no a/b (404)" in finished.stderr
    assert "the service's last words" in finished.stderr
    assert "compose up --detach --wait" not in calls


@pytest.mark.parametrize("file", ["compose.yaml", "api/Dockerfile"])
def test_the_same_check_runs_in_the_container(file: str) -> None:
    assert "specops.http.server.healthcheck" in (ROOT / file).read_text()


# An engine with one fault. What the client says is from Docker 26.1 and 28.2.
BROKEN = """\
#!/bin/sh
case "$1" in
{fault}
run) echo "WARNING: Your kernel does not support swap limit capabilities" >&2 ;;
esac
"""
CGROUPS = (
    'docker: Error response from daemon: cannot enter cgroupv2 "/sys/fs/cgroup/docker" with domain '
    "controllers -- it is in an invalid state: unknown."
)
FAULTS = {
    "no Docker Engine answers": "info) exit 1 ;;",
    "the Docker Engine cannot keep an image (no space left on device)": (
        "import) echo 'Error response from daemon: no space left on device' >&2; exit 1 ;;"
    ),
    "the Docker Engine cannot start a container with a memory limit (cannot enter cgroupv2 "
    '"/sys/fs/cgroup/docker" with domain controllers -- it is in an invalid state: unknown.)': (
        f"run) printf '%s\\n' '{CGROUPS}' '' "
        "\"Run 'docker run --help' for more information\" >&2; exit 125 ;;"
    ),
    "Docker has no compose plugin": "compose) exit 1 ;;",
}


@pytest.mark.parametrize("reason", FAULTS)
def test_an_engine_that_cannot_run_the_stack_is_named_and_the_stack_runs_natively(
    reason: str, tmp_path: Path
) -> None:
    programs = {
        name: (ROOT / name).read_text()
        for name in ("scripts/up", "scripts/probe-engine", "scripts/native_pid")
    }
    programs["scripts/venv"] = "#!/bin/sh\n"
    programs[".venv/bin/python"] = '#!/bin/sh\necho "started: $*"\n'
    programs["bin/docker"] = BROKEN.format(fault=FAULTS[reason])
    write_programs(tmp_path, **programs)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "NATIVE_STATE": str(tmp_path)}
    started = run(tmp_path / "scripts/up", env=env)
    assert started.returncode == 0, started.stderr
    assert started.stdout.splitlines() == [
        f"Running natively, without Grafana: {reason}.",
        "started: scripts/native.py",
    ]


def test_a_warning_of_the_engine_is_shown(tmp_path: Path) -> None:
    """It starts containers, but cannot hold a limit that they ask for."""
    write_programs(tmp_path, docker=BROKEN.format(fault=""))
    probed = run("scripts/probe-engine", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert probed.returncode == 0
    assert probed.stdout == "WARNING: Your kernel does not support swap limit capabilities\n"


def test_in_a_codespace_the_addresses_are_those_of_its_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODESPACE_NAME", "octocat-space")
    monkeypatch.setenv("GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN", "app.github.dev")
    finished, _ = up(tmp_path, state("ready"))
    for port in (8000, 3000, 9090):
        assert f"https://octocat-space-{port}.app.github.dev\n" in finished.stdout
