"""The peers' environment is made once, and a failed installation says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.environment import InstallError, install, installed


def test_only_a_complete_environment_of_these_versions_counts(tmp_path: Path) -> None:
    assert not installed(tmp_path, ("a==1",))
    (tmp_path / "venv").mkdir(parents=True)
    (tmp_path / "venv" / "installed.txt").write_text("a==1\nb==2\n")
    assert install(tmp_path, ("a==1", "b==2")) == tmp_path / "venv" / "bin" / "python"
    assert not installed(tmp_path, ("a==1", "b==3"))


def test_without_an_index_the_reason_is_said_and_nothing_counts_as_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(InstallError, match=r"cannot be installed(.|\n)*no-such-peer"):
        install(tmp_path, ("no-such-peer==1",))
    assert not installed(tmp_path, ("no-such-peer==1",))
