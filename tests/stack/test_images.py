"""The Dockerfiles: non-root, checked for health, no torch, no BuildKit-only syntax."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.stack.support import ROOT

DOCKERFILES = [ROOT / name / "Dockerfile" for name in ("api", "gateway", "loadtest")]
every_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, rest) pairs, continuation lines joined, comments left out."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in lines)]


@every_image
def test_the_process_is_not_root(path: Path) -> None:
    users = [rest for word, rest in instructions(path) if word == "USER"]
    assert users
    assert int(users[-1].split(":")[0]) > 0


@every_image
def test_the_base_image_is_an_argument(path: Path) -> None:
    assert instructions(path)[0] == ("ARG", "PYTHON_IMAGE=python:3.11-slim")
    bases = {rest.split()[0] for word, rest in instructions(path) if word == "FROM"}
    assert bases == {"${PYTHON_IMAGE}"}


@every_image
def test_health_is_checked_without_a_shell(path: Path) -> None:
    checks = [rest for word, rest in instructions(path) if word == "HEALTHCHECK"]
    assert len(checks) == 1
    assert 'CMD ["python"' in checks[0]


@every_image
def test_an_engine_without_buildkit_can_build_it(path: Path) -> None:
    text = path.read_text()
    for feature in ("# syntax=", "RUN --", "<<EOF", "COPY --link", "COPY --chmod"):
        assert feature not in text


def test_the_api_image_takes_no_extras_and_keeps_no_tools() -> None:
    lines = instructions(ROOT / "api" / "Dockerfile")
    assert [rest for word, rest in lines if word == "FROM"][-1] == "${PYTHON_IMAGE}"
    installs = [rest for word, rest in lines if word == "RUN" and "pip install" in rest]
    assert installs
    assert not any("[" in rest or "torch" in rest or "locust" in rest for rest in installs)


def test_the_service_depends_on_neither_torch_nor_locust() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.split(">")[0].split("=")[0] for requirement in project["dependencies"]}
    assert not names & {"torch", "locust", "onnxruntime-genai"}


@pytest.mark.parametrize(("extra", "image"), [("load", "loadtest"), ("gateway", "gateway")])
def test_an_image_has_the_version_of_the_project(extra: str, image: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"][extra]
    assert f'"{wanted}"' in (ROOT / image / "Dockerfile").read_text()


@every_image
def test_everything_copied_is_let_through_by_dockerignore(path: Path) -> None:
    context = ROOT if path.parent.name == "api" else path.parent
    allowed = {
        line[1:] for line in (context / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    for word, rest in instructions(path):
        if word == "COPY" and "--from" not in rest:
            for source in rest.replace("${WHEELS}", "LICENSE").split()[:-1]:
                assert source in allowed or source.split("/")[0] in allowed, source


def test_the_image_of_every_architecture_has_a_wheel() -> None:
    """docker-bake.hcl builds for what scripts/wheels makes wheels for, and compiles nothing."""
    text = (ROOT / "docker-bake.hcl").read_text()
    platforms = re.search(r"platforms\s*=\s*(\[.*\])", text)
    assert platforms is not None
    assert json.loads(platforms[1]) == ["linux/amd64", "linux/arm64"]
    assert re.search(r'dockerfile\s*=\s*"api/Dockerfile"', text)
    assert re.search(r'WHEELS\s*=\s*"dist"', text)
    assert "!dist" in (ROOT / ".dockerignore").read_text().splitlines()
    assert '"python:3.11-slim"' in text


def test_baking_builds_the_image_alone_whatever_compose_says() -> None:
    """Without -f, compose.yaml's services are targets too, and a group "default" of all of them."""
    text = (ROOT / "docker-bake.hcl").read_text()
    group = re.search(r'group "default" \{\s*targets = (\[.*\])', text)
    assert group is not None
    targets = re.findall(r'^target "(\w+)"', text, flags=re.MULTILINE)
    assert json.loads(group[1]) == targets
    assert not set(targets) & set(yaml.safe_load((ROOT / "compose.yaml").read_text())["services"])


def wheel_for(machine: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What the Dockerfile's step would install, by a shell with another uname."""
    step = next(
        rest
        for word, rest in instructions(ROOT / "api" / "Dockerfile")
        if word == "RUN" and "ours=" in rest
    )
    choice, _, _ = step.partition("&& /opt/specops")
    script = f'uname() {{ echo {machine}; }}; {choice} && echo "$ours"'
    return subprocess.run(
        ["sh", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """The folder of the step, where `WHEELS` has put nothing yet."""
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_image_takes_the_wheel_of_its_machine(wheels: Path, machine: str) -> None:
    for built in ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64", "macosx_11_0_arm64"):
        (wheels / f"specops-0.1.0-py3-none-{built}.whl").touch()
    expected = f"wheels/specops-0.1.0-py3-none-manylinux_2_28_{machine}.whl"
    assert wheel_for(machine, wheels.parent).stdout.strip() == expected


def test_a_wheel_that_is_missing_ends_the_build(wheels: Path) -> None:
    """Compiling it instead would be slow in an emulator, and nobody would see why."""
    (wheels / "specops-0.1.0-py3-none-manylinux_2_28_x86_64.whl").touch()
    done = wheel_for("aarch64", wheels.parent)
    assert done.returncode != 0
    assert "no wheel for aarch64: scripts/wheels makes it" in done.stderr


def test_without_wheels_the_image_compiles(wheels: Path) -> None:
    (wheels / "LICENSE").touch()  # what the Dockerfile copies by default
    assert wheel_for("riscv64", wheels.parent).stdout.strip() == "."
