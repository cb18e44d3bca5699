"""The Dockerfiles: no root, checked for health, no torch, no BuildKit-only syntax."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.stack.support import ROOT

DOCKERFILES = [ROOT / name / "Dockerfile" for name in ("api", "deploy/gateway", "loadtest")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
every_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, rest) pairs, with continuation lines joined and without comments."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in lines)]


@every_image
def test_an_image_runs_without_root_on_a_chosen_base_and_is_checked(path: Path) -> None:
    lines = instructions(path)
    users = [rest for word, rest in lines if word == "USER"]
    assert int(users[-1].split(":")[0]) > 0
    assert lines[0] == ("ARG", "PYTHON_IMAGE=python:3.11-slim")
    assert {rest.split()[0] for word, rest in lines if word == "FROM"} == {"${PYTHON_IMAGE}"}
    (check,) = (rest for word, rest in lines if word == "HEALTHCHECK")
    assert 'CMD ["python"' in check  # without a shell


@every_image
def test_an_engine_without_buildkit_can_build_it(path: Path) -> None:
    for feature in ("# syntax=", "RUN --", "<<EOF", "COPY --link", "COPY --chmod"):
        assert feature not in path.read_text()


@every_image
def test_dockerignore_lets_everything_copied_through(path: Path) -> None:
    context = ROOT if path.parent.name == "api" else path.parent
    allowed = {
        line[1:] for line in (context / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    for word, rest in instructions(path):
        if word == "COPY" and "--from" not in rest:
            for source in rest.replace("${WHEELS}", "LICENSE").split()[:-1]:
                assert {source, source.split("/")[0]} & allowed, source


def test_the_api_image_installs_the_lock_and_no_extras() -> None:
    lines = instructions(ROOT / "api" / "Dockerfile")
    installs = [rest for word, rest in lines if word == "RUN" for rest in rest.split("&&")]
    installs = [rest for rest in installs if "pip install" in rest]
    assert len(installs) == 2
    assert all("--no-deps" in rest and "[" not in rest for rest in installs)
    assert "--require-hashes" in installs[0]
    names = {requirement.split(">")[0].split("=")[0] for requirement in PROJECT["dependencies"]}
    assert not names & {"torch", "locust", "onnxruntime-genai"}


@pytest.mark.parametrize(("extra", "image"), [("load", "loadtest"), ("gateway", "deploy/gateway")])
def test_an_image_has_the_version_of_the_project(extra: str, image: str) -> None:
    (pinned,) = PROJECT["optional-dependencies"][extra]
    assert f'"{pinned}"' in (ROOT / image / "Dockerfile").read_text()


@pytest.mark.parametrize(
    ("machine", "there", "expected"),
    [
        (
            "x86_64",
            ("x86_64", "aarch64"),
            "wheels/specops-0.1.0-py3-none-manylinux_2_28_x86_64.whl",
        ),
        (
            "aarch64",
            ("x86_64", "aarch64"),
            "wheels/specops-0.1.0-py3-none-manylinux_2_28_aarch64.whl",
        ),
        # To compile it instead would be slow in an emulator, and hard to notice.
        ("aarch64", ("x86_64",), "There is no wheel for aarch64: scripts/wheels makes it"),
        ("riscv64", (), "."),
    ],
)
def test_the_image_takes_the_wheel_of_its_machine_or_compiles(
    machine: str, there: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "wheels").mkdir()
    for built in there:
        (tmp_path / "wheels" / f"specops-0.1.0-py3-none-manylinux_2_28_{built}.whl").touch()
    if not there:
        (tmp_path / "wheels" / "LICENSE").touch()  # what the Dockerfile copies by default
    lines = instructions(ROOT / "api" / "Dockerfile")
    (step,) = (rest for word, rest in lines if word == "RUN" and "ours=" in rest)
    choice, _, _ = step.partition("&& /opt/specops")
    script = f'uname() {{ echo {machine}; }}; {choice} && echo "$ours"'
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert expected in (done.stdout.strip(), done.stderr.strip())
    assert (done.returncode == 0) == (expected == done.stdout.strip())
