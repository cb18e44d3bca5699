"""What opens a workspace and what checks a change: the dev container, the workflow, the lock."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.stack.support import ROOT, run

WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
every_job = pytest.mark.parametrize("job", JOBS)
PORTS = {8000: "API", 3000: "Grafana", 9090: "Prometheus", 8089: "Locust"}


def commands(job: str) -> str:
    """All that a job runs."""
    return "\n".join(step.get("run", "") for step in JOBS[job]["steps"])


def dev_container() -> dict[str, Any]:
    """devcontainer.json, without its comments."""
    text = (ROOT / ".devcontainer/devcontainer.json").read_text()
    found: dict[str, Any] = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    return found


# -- the workflow ------------------------------------------------------------------------------


@every_job
def test_every_action_is_pinned_to_a_commit_with_its_version_beside_it(job: str) -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    used = [step["uses"] for step in JOBS[job]["steps"] if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
        assert re.search(rf"{re.escape(action)} # v\d+\.\d+\.\d+$", text, re.MULTILINE)


@every_job
def test_a_job_ends_by_itself_and_may_only_read(job: str) -> None:
    assert JOBS[job]["timeout-minutes"] <= 60
    assert "permissions" not in JOBS[job]
    assert WORKFLOW["permissions"] == {"contents": "read"}


@every_job
def test_what_a_job_calls_exists(job: str) -> None:
    for path in re.findall(r"(?:^|\s)((?:scripts|tests|api|loadtest)/[\w./-]+)", commands(job)):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"make (\w+)", commands(job)):
        assert f"\n{target}: ;" in (ROOT / "Makefile").read_text()


def test_the_jobs_together_do_what_the_one_command_does() -> None:
    everything = "\n".join(map(commands, JOBS))
    check = (ROOT / "scripts/check").read_text()
    for command in re.findall(
        r"^(scripts/\w+|\.venv\S+ -m tests\.\w+(?: --\w+ \d+)*)", check, re.MULTILINE
    ):
        assert command in everything, command


def test_whoever_checks_has_a_browser_and_a_prometheus() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(name.startswith("playwright") for name in extras["optional-dependencies"]["dev"])
    one_command = (ROOT / ".ci/run").read_text()
    for programs in (one_command, commands("e2e")):
        assert re.search(r"chromium|google-chrome", programs)
        assert "prometheus" in programs


def test_the_image_is_built_measured_listed_and_audited() -> None:
    assert JOBS["image"]["env"]["MOST_MEGABYTES"] <= 450
    builds = [
        step["with"] for step in JOBS["image"]["steps"] if "build-push" in step.get("uses", "")
    ]
    assert any(build.get("sbom") for build in builds)
    assert all("type=gha" in build["cache-from"] for build in builds)
    assert "pip-audit --requirement api/requirements.lock" in commands("audit")


def test_dependabot_looks_after_everything_that_is_pinned() -> None:
    config = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())
    kinds = {entry["package-ecosystem"] for entry in config["updates"]}
    assert {"github-actions", "pip", "docker", "docker-compose"} <= kinds
    for entry in config["updates"]:
        for folder in entry.get("directories", [entry.get("directory")]):
            assert (ROOT / folder.lstrip("/")).is_dir()


# -- the lock ----------------------------------------------------------------------------------


def locked() -> dict[str, str]:
    """Package → version of the lock."""
    text = (ROOT / "api/requirements.lock").read_text()
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def test_every_pin_has_hashes() -> None:
    text = (ROOT / "api/requirements.lock").read_text()
    pins = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert len(pins) == len(locked())
    for pin in pins:
        assert "--hash=sha256:" in pin, pin


def test_the_lock_answers_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {name.lower().replace("_", "-"): version for name, version in locked().items()}
    for text in project["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[wanted.name.lower().replace("_", "-")]), text


def test_the_image_installs_the_lock_and_nothing_else() -> None:
    text = (ROOT / "api/Dockerfile").read_text()
    installs = re.findall(r"pip install (.*?)(?:\\| &&|$)", text, re.MULTILINE)
    assert len(installs) == 2
    assert all("--no-deps" in install for install in installs)
    assert "--require-hashes" in installs[0]


# -- the dev container -------------------------------------------------------------------------


def test_the_workspace_is_the_small_one() -> None:
    wanted = dev_container()["hostRequirements"]
    assert (wanted["cpus"], wanted["memory"]) == (2, "8gb")


def test_the_ports_of_the_stack_are_forwarded_and_named() -> None:
    config = dev_container()
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    published = {
        int(port.rpartition(":")[2]) for service in compose.values() for port in service["ports"]
    }
    assert set(config["forwardPorts"]) == published == set(PORTS)
    labels = {int(port): about["label"] for port, about in config["portsAttributes"].items()}
    assert labels == PORTS


def test_it_brings_an_engine_and_runs_scripts_that_are_there() -> None:
    config = dev_container()
    (feature,) = config["features"]
    folder = ROOT / ".devcontainer" / feature
    about = json.loads((folder / "devcontainer-feature.json").read_text())
    assert about["privileged"]
    assert os.access(folder / "install.sh", os.X_OK)
    assert f"cat >{about['entrypoint']} " in (folder / "install.sh").read_text()
    for command in (config["onCreateCommand"], config["postCreateCommand"]):
        shell, path = command.split()
        assert shell == "bash"
        assert os.access(ROOT / path, os.X_OK)


def post_create(tmp_path: Path, status: int) -> Any:
    """Run the script beside a swap-setup.sh that ends with this status."""
    folder = tmp_path / ".devcontainer"
    folder.mkdir()
    script = folder / "post-create"
    script.write_text((ROOT / ".devcontainer/post-create").read_text())
    swap = tmp_path / "swap-setup.sh"
    swap.write_text(f"#!/bin/sh\nexit {status}\n")
    swap.chmod(0o755)
    sudo = tmp_path / "bin" / "sudo"  # where the tests are not root's
    sudo.parent.mkdir()
    sudo.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    sudo.chmod(0o755)
    return run("bash", script, env={"PATH": f"{sudo.parent}:{os.environ['PATH']}"})


@pytest.mark.parametrize("status", [0, 3, 4])
def test_a_workspace_without_swap_is_a_workspace(status: int, tmp_path: Path) -> None:
    done = post_create(tmp_path, status)
    assert done.returncode == 0, done.stderr
    assert "make up" in done.stdout
    assert ("4 GB" in done.stdout) == (status != 0)


def test_a_swap_script_that_fails_is_not_passed_over(tmp_path: Path) -> None:
    assert post_create(tmp_path, 1).returncode == 1
