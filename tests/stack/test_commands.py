"""The commands of the project: short targets, clear refusals, clean ends."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import native
from tests.stack.support import ROOT, run, write_programs

TARGETS = (
    *("up", "down", "test", "lint", "load", "bench", "check", "presets", "soak"),
    *("fuzz", "files", "clients", "train", "clean"),
)


def test_every_target_is_one_line() -> None:
    text = (ROOT / "Makefile").read_text()
    found = re.findall(r"^([a-z]+): ; @(.+)$", text, flags=re.MULTILINE)
    assert tuple(name for name, _ in found) == TARGETS
    assert "\n\t" not in text
    for _, command in found:
        assert os.access(ROOT / command.split()[0], os.X_OK), command


@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python"])
def test_an_old_python_is_refused_by_name(python: str, tmp_path: Path) -> None:
    write_programs(tmp_path, **{"scripts/venv": (ROOT / "scripts" / "venv").read_text()})
    result = run(tmp_path / "scripts" / "venv", env={"PYTHON": python})
    assert result.returncode != 0
    assert "Python 3.11 or newer is needed" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_environment_overrides_dotenv(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    assert native.environment(dotenv, {"A": "1"}) == {"A": "1"}
    dotenv.write_text(
        "# SPECOPS_SLOTS=9\nSPECOPS_PORT='8001'\nSPECOPS_SLOTS=2\nSPECOPS_CACHE_DIR=~/cache\n"
        "PROMETHEUS_PORT=9099\nGRAFANA_ADMIN_PASSWORD=secret\nHF_TOKEN=mine\n"
    )
    assert native.environment(dotenv, {"SPECOPS_SLOTS": "3"}) == {
        "SPECOPS_PORT": "8001",
        "SPECOPS_SLOTS": "3",
        "SPECOPS_CACHE_DIR": str(Path.home() / "cache"),
        "PROMETHEUS_PORT": "9099",
        "HF_TOKEN": "mine",
    }


def test_replicas_have_ports_of_their_own_that_no_client_is_lent() -> None:
    ports = [address.port for address in native.free_addresses(9)]
    assert len(set(ports)) == 9
    assert all(12_000 <= port < 32_000 for port in ports)


def test_the_keys_of_the_api_are_printed_for_the_load_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECOPS_API_KEYS", "first,second")
    monkeypatch.setattr(sys, "argv", ["native.py", "--print-keys"])
    assert native.main() == 0
    assert capsys.readouterr().out == "first,second\n"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("SPECOPS_PORT", ["http", "0", "65536", "-1"]),
        ("PROMETHEUS_PORT", ["0"]),
        ("REPLICAS", ["some", "0", "65", "-1"]),
    ],
)
def test_a_wrong_setting_is_named(name: str, values: list[str], tmp_path: Path) -> None:
    for value in values:
        with pytest.raises(native.StartError, match=f"{name} takes a"):
            native.run(tmp_path / "state", {name: value})


def test_a_taken_port_stops_the_start_and_names_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(native.StartError, match=rf"{port}.*SPECOPS_PORT=…"):
            native.run(tmp_path / "state", {"SPECOPS_PORT": str(port)})
    assert not (tmp_path / "state").exists()


def test_a_server_that_listens_everywhere_is_reached_on_this_machine() -> None:
    address = native.Address.read({}, "SPECOPS_PORT", 8000, "0.0.0.0")  # noqa: S104
    assert address.url == "http://127.0.0.1:8000"


def test_in_a_codespace_a_browser_gets_the_name_of_its_proxy() -> None:
    address = native.Address.read({}, "SPECOPS_PORT", 8000, "127.0.0.1")
    codespace = {
        "CODESPACE_NAME": "octocat-space",
        "GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN": "app.github.dev",
    }
    assert native.in_browser(address, codespace) == "https://octocat-space-8000.app.github.dev"
    assert native.in_browser(address, {}) == "http://127.0.0.1:8000"


def test_a_second_stack_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    """It would overwrite the first stack's logs, and `make down` could not find that stack."""
    program = tmp_path / "native.py"
    program.write_text("input()")
    with subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE) as first:
        (tmp_path / "native.pid").write_text(str(first.pid))
        second = run("scripts/up", "--native", env={"NATIVE_STATE": str(tmp_path)})
        first.communicate(b"\n")
    assert second.returncode == 1
    assert f"A stack is already running here (process {first.pid})" in second.stderr


def test_a_part_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo the disk is full; exit 7"]
    part = native.Part("The API", command, tmp_path / "log", dict(os.environ))
    part.process.wait()
    with pytest.raises(native.StartError, match=r"The API exited with status 7(?s:.*)disk is full"):
        part.require_alive()


def test_a_part_that_ignores_sigterm_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = tmp_path / "ready"
    command = ["sh", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"]
    part = native.Part("Stubborn", command, tmp_path / "log", dict(os.environ))
    while not ready.exists():
        assert part.process.poll() is None
    part.stop(patience=0.2)
    assert part.process.returncode == -9
    assert "Stubborn did not stop" in capsys.readouterr().out
