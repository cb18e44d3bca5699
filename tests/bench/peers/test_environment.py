"""The peers' environment is made once, and its absence is said in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers import environment
from bench.peers.environment import InstallError, install, installed


def make(home: Path, packages: tuple[str, ...]) -> None:
    (home / "venv").mkdir(parents=True)
    (home / "venv" / "installed.txt").write_text("\n".join(packages) + "\n")


def unexpected(command: list[str]) -> None:
    raise AssertionError(f"ran {command}")


def test_a_complete_environment_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_run", unexpected)
    make(tmp_path, ("a==1", "b==2"))
    python = install(print, tmp_path, ("a==1", "b==2"))
    assert python == tmp_path / "venv" / "bin" / "python"


def test_other_versions_or_half_an_installation_do_not_count(tmp_path: Path) -> None:
    assert not installed(tmp_path, ("a==1",))
    make(tmp_path, ("a==1",))
    assert installed(tmp_path, ("a==1",))
    assert not installed(tmp_path, ("a==2",))
    (tmp_path / "venv" / "installed.txt").unlink()
    assert not installed(tmp_path, ("a==1",))


def test_without_an_index_the_reason_is_said_and_nothing_counts_as_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    told: list[str] = []
    with pytest.raises(InstallError, match=r"cannot be installed(.|\n)*no-such-peer"):
        install(told.append, tmp_path, ("no-such-peer==1",))
    assert not installed(tmp_path, ("no-such-peer==1",))
    assert "no-such-peer==1" in told[0]
