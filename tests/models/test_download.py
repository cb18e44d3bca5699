"""Downloads on bad lines and full disks: what comes is whole and checked, what came is kept."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest

from specops.models import download
from specops.models.hub import fetch, is_complete
from specops.models.prepare import ModelError
from tests.models.disks import small_disk
from tests.models.hub_server import Hub
from tests.models.tiny_repo import MODEL, NEEDED, REPO, ignore, names


def test_progress_goes_from_nothing_to_everything(hub: Hub, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    fetch(MODEL, tmp_path, lambda done, total: told.append((done, total)))
    total = sum(len(hub.repos[REPO][name]) for name in NEEDED)
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_every_piece_is_told_when_there_is_time(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(download, "_PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(download, "_LOG_SECONDS", 0.0)
    hub.cuts = [5000]
    told: list[int] = []
    with caplog.at_level(logging.INFO):
        fetch(MODEL, tmp_path, lambda done, total: told.append(done))
    assert told == sorted(told)
    assert len(set(told)) > len(NEEDED)
    assert "of 0.6 MB" in caplog.text or "of 0.5 MB" in caplog.text


def test_a_cut_connection_is_resumed_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [4000, 3000]
    folder = fetch(MODEL, tmp_path, ignore)
    assert hub.ranges() == ["", "bytes=4000-", "bytes=7000-"]
    weights = hub.repos[REPO]["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == weights


def test_a_connection_that_brings_nothing_is_given_up(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [4000, *[0] * 50]
    with pytest.raises(ModelError, match=r"cannot be reached.*HF_ENDPOINT.*is kept"):
        fetch(MODEL, tmp_path, ignore)
    assert len(hub.ranges()) == 1 + 6 - 1  # the first brought something and counts as well
    folder = MODEL.folder(tmp_path)
    assert not is_complete(folder, MODEL)
    assert "model.safetensors" not in names(folder)


def test_the_next_start_goes_on_where_the_last_one_ended(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [4000, *[0] * 50]
    with pytest.raises(ModelError):
        fetch(MODEL, tmp_path, ignore)
    hub.cuts = []
    hub.requests.clear()
    told: list[tuple[int, int]] = []
    fetch(MODEL, tmp_path, lambda done, total: told.append((done, total)))
    assert hub.ranges() == ["bytes=4000-"]
    assert not any(path.endswith("/config.json") for _, path, _ in hub.requests)
    assert told[-1][0] == told[-1][1]


def test_a_server_without_ranges_starts_over(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = MODEL.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json.part").write_bytes(b"{")  # small files come without ranges here
    fetch(MODEL, tmp_path, ignore)
    assert (folder / "config.json").read_bytes() == hub.repos[REPO]["config.json"]


def test_what_is_left_of_other_weights_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    folder = MODEL.folder(tmp_path)
    folder.mkdir(parents=True)
    weights = hub.repos[REPO]["model.safetensors"]
    (folder / "model.safetensors").write_bytes(weights[::-1])
    (folder / "config.json.part").write_bytes(b"x" * 100_000)
    fetch(MODEL, tmp_path, ignore)
    assert (folder / "model.safetensors").read_bytes() == weights


def test_a_wrong_checksum_is_an_error_and_nothing_is_kept(hub: Hub, tmp_path: Path) -> None:
    hub.damage = True
    with pytest.raises(ModelError, match=r"model\.safetensors.*checksum.*not kept"):
        fetch(MODEL, tmp_path, ignore)
    left = names(MODEL.folder(tmp_path))
    assert not any(name.startswith(("model", "download.json")) for name in left)
    hub.damage = False
    assert is_complete(fetch(MODEL, tmp_path, ignore), MODEL)


def test_a_disk_without_room_is_refused_before_anything_is_fetched(
    hub: Hub, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(ModelError, match=r"has room for .* needs .*SPECOPS_CACHE_DIR"):
            fetch(MODEL, disk, ignore)
        assert names(MODEL.folder(disk)) == set()
    assert hub.ranges() == []


def test_a_disk_that_fills_up_loses_nothing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_check_room", lambda folder, files: None)
    with small_disk(tmp_path / "disk", "256k") as disk:
        with pytest.raises(ModelError, match=r"is full.*SPECOPS_CACHE_DIR"):
            fetch(MODEL, disk, ignore)
        folder = MODEL.folder(disk)
        assert "model.safetensors" not in names(folder)
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        fetch(MODEL, disk, ignore)
        assert hub.ranges()[-1].startswith("bytes=")
        assert (folder / "model.safetensors").read_bytes() == hub.repos[REPO]["model.safetensors"]


def test_a_full_disk_is_said(hub: Hub, tmp_path: Path) -> None:
    folder = MODEL.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "model.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(ModelError, match=r"is full.*SPECOPS_CACHE_DIR.*next start goes on"):
        fetch(MODEL, tmp_path, ignore)
    assert not is_complete(folder, MODEL)
