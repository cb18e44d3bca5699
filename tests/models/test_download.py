"""Downloads over bad connections, to full disks, from hubs that refuse: the result is whole."""

import hashlib
import logging
from pathlib import Path

import pytest

from specops.models import download
from specops.models.hub import HubModel, is_complete
from specops.models.prepare import ModelError, fetch
from tests.models.disks import small_disk
from tests.models.hub_server import Hub
from tests.models.tiny_repo import MODEL, NEEDED, REPO, ignore, names


def test_progress_goes_from_nothing_to_everything(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(download, "_PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(download, "_LOG_SECONDS", 0.0)
    hub.cuts = [5000]
    reported: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO):
        fetch(MODEL, tmp_path, lambda done, total: reported.append((done, total)))
    total = sum(len(hub.repos[REPO][name]) for name in NEEDED)
    assert (reported[0], reported[-1]) == ((0, total), (total, total))
    assert reported == sorted(reported)
    assert len(set(reported)) > len(NEEDED)
    assert f"of {total / 1e6:.1f} MB" in caplog.text


def test_a_cut_connection_is_resumed_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [4000, 3000]
    folder = fetch(MODEL, tmp_path, ignore)
    assert hub.ranges() == ["", "bytes=4000-", "bytes=7000-"]
    weights = hub.repos[REPO]["model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == weights


def test_the_next_start_goes_on_where_the_last_one_ended(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [4000, *[0] * 50]
    with pytest.raises(ModelError, match=r"cannot be reached.*HF_ENDPOINT.*is kept"):
        fetch(MODEL, tmp_path, ignore)
    assert len(hub.ranges()) == 1 + 6 - 1  # the first attempt brought bytes and counts as well
    folder = MODEL.folder(tmp_path)
    assert not is_complete(folder, MODEL)
    assert "model.safetensors" not in names(folder)
    hub.cuts = []
    hub.requests.clear()
    reported: list[tuple[int, int]] = []
    fetch(MODEL, tmp_path, lambda done, total: reported.append((done, total)))
    assert hub.ranges() == ["bytes=4000-"]
    assert not any(path.endswith("/config.json") for _, path, _ in hub.requests)
    assert reported[-1][0] == reported[-1][1]


def test_leftovers_of_other_files_are_not_kept(hub: Hub, tmp_path: Path) -> None:
    folder = MODEL.folder(tmp_path)
    folder.mkdir(parents=True)
    weights, config = (hub.repos[REPO][name] for name in ("model.safetensors", "config.json"))
    (folder / "model.safetensors").write_bytes(weights[::-1])
    (folder / "model.safetensors.0123456789ab.part").write_bytes(weights[:4000])
    (folder / "config.json.part").write_bytes(b"x" * 100_000)
    (folder / "tokenizer.json.part").write_bytes(b"{")  # small files come without ranges here
    fetch(MODEL, tmp_path, ignore)
    assert (folder / "model.safetensors").read_bytes() == weights
    assert (folder / "config.json").read_bytes() == config
    assert (folder / "tokenizer.json").read_bytes() == hub.repos[REPO]["tokenizer.json"]
    assert names(folder) == {*NEEDED, "download.json"}


def test_a_download_goes_on_though_the_hub_has_another_version_now(
    hub: Hub, tmp_path: Path
) -> None:
    hub.cuts = [4000, *[0] * 50]
    with pytest.raises(ModelError, match="is kept"):
        fetch(MODEL, tmp_path, ignore)
    hub.cuts = []
    other = {**hub.repos[REPO], "model.safetensors": hub.repos[REPO]["model.safetensors"][::-1]}
    hub.repos = {REPO: other}
    folder = fetch(MODEL, tmp_path, ignore)
    assert (folder / "model.safetensors").read_bytes() == other["model.safetensors"]
    assert names(folder) == {*NEEDED, "download.json"}


def test_a_wrong_checksum_is_an_error_and_nothing_is_kept(hub: Hub, tmp_path: Path) -> None:
    hub.damage = True
    with pytest.raises(ModelError, match=r"model\.safetensors.*checksum.*deleted"):
        fetch(MODEL, tmp_path, ignore)
    left = names(MODEL.folder(tmp_path))
    assert not any(name.startswith(("model", "download.json")) for name in left)
    hub.damage = False
    assert is_complete(fetch(MODEL, tmp_path, ignore), MODEL)


def test_a_disk_without_room_is_refused_before_the_download(hub: Hub, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(ModelError, match=r"has room for .* needs .*SPECOPS_CACHE_DIR"):
            fetch(MODEL, disk, ignore)
        assert names(MODEL.folder(disk)) == set()
    assert hub.ranges() == []


def test_a_full_disk_is_an_error(hub: Hub, tmp_path: Path) -> None:
    folder = MODEL.folder(tmp_path)
    folder.mkdir(parents=True)
    digest = hashlib.sha256(hub.repos[REPO]["model.safetensors"]).hexdigest()
    (folder / f"model.safetensors.{digest[:12]}.part").symlink_to("/dev/full")
    with pytest.raises(ModelError, match=r"is full.*SPECOPS_CACHE_DIR.*next start continues"):
        fetch(MODEL, tmp_path, ignore)
    assert not is_complete(folder, MODEL)


# -- a hub that refuses ----------------------------------------------------------------------------


def test_a_private_model_needs_a_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"  # noqa: S105 - of this test's own hub
    with pytest.raises(ModelError, match=r"someone/tiny \(401\).*HF_TOKEN"):
        fetch(MODEL, tmp_path, ignore)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert is_complete(fetch(MODEL, tmp_path, ignore), MODEL)
    assert len(hub.ranges()) == 1
    assert hub.leaked == []


def test_what_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.gone = "tokenizer.json"
    for model, message in (
        (MODEL, r"someone/tiny@main \(404\)"),
        (HubModel("no/model"), r"no no/model@main \(404\)"),
        (HubModel(REPO, "v9"), r"someone/tiny has no revision v9"),
    ):
        with pytest.raises(ModelError, match=message):
            fetch(model, tmp_path, ignore)
        assert not is_complete(model.folder(tmp_path), model)


@pytest.mark.parametrize(
    ("status", "message", "requests"),
    [
        (403, r"\(403\): accept its terms.*HF_TOKEN", 1),
        (500, r"\(500\): start again later", 6),
    ],
)
def test_a_refusal_says_why(
    hub: Hub, tmp_path: Path, status: int, message: str, requests: int
) -> None:
    hub.status = status
    with pytest.raises(ModelError, match=message):
        fetch(MODEL, tmp_path, ignore)
    assert len(hub.requests) == requests


def test_a_busy_hub_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    hub.busy = 3
    assert is_complete(fetch(MODEL, tmp_path, ignore), MODEL)
    assert [path for _, path, _ in hub.requests[:4]] == [hub.requests[0][1]] * 4


def test_a_token_that_cannot_be_one_is_named(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_\u00fc")
    with pytest.raises(ModelError, match="HF_TOKEN has characters that no token has"):
        fetch(MODEL, tmp_path, ignore)


def test_a_carriage_return_behind_the_hub_s_address_changes_nothing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/\r")
    assert is_complete(fetch(MODEL, tmp_path, ignore), MODEL)


def test_an_address_with_a_character_that_none_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub\x01.example")
    with pytest.raises(ModelError, match=r"cannot be reached.*Invalid.*HF_ENDPOINT"):
        fetch(MODEL, tmp_path, ignore)


@pytest.mark.parametrize("address", ["localhost:9", "not a url"])
def test_an_address_that_is_none_is_tried_once(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(ModelError, match=r"cannot be reached.*'http://'.*HF_ENDPOINT"):
        fetch(MODEL, tmp_path, ignore)
    assert "retrying" not in caplog.text


def test_a_hub_that_cannot_be_reached_is_an_error(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"cannot be reached.*HF_ENDPOINT"):
        fetch(MODEL, tmp_path, ignore)
