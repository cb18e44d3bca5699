"""Models by their names on the hub: where they are kept, and that they are fetched once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from specops.models.hub import HubModel, fetch, is_complete
from specops.models.prepare import ModelError
from tests.models.hub_server import Hub
from tests.models.tiny_repo import MODEL, ignore


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubModel("org/name")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        ("org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("org/na-me.1@main:cpu/int4", HubModel("org/na-me.1", "main", "cpu/int4")),
        ("org/name:cpu/int4/", HubModel("org/name", "main", "cpu/int4")),
        ("name", None),
        ("/nowhere", None),
        ("./nowhere", None),
        ("~/nowhere", None),
        ("../nowhere", None),
        ("a/b/c", None),
        ("org/name@", None),
        ("org/na me", None),
    ],
)
def test_a_name_on_the_hub_is_told_from_a_path(text: str, expected: HubModel | None) -> None:
    assert HubModel.parse(text) == expected


def test_models_do_not_share_folders(tmp_path: Path) -> None:
    models = [MODEL, replace(MODEL, revision="v1"), replace(MODEL, subfolder="a/b")]
    folders = {model.folder(tmp_path) for model in models}
    assert len(folders) == len(models)
    escape = HubModel("a/b", "../../x", "../..").folder(tmp_path)
    assert escape.resolve().is_relative_to(tmp_path / "hub" / "a--b")


def test_a_second_start_asks_for_nothing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(MODEL, tmp_path, ignore)
    hub.requests.clear()
    assert fetch(MODEL, tmp_path, ignore) == folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(MODEL, tmp_path, ignore) == folder
    assert hub.requests == []


def test_offline_with_an_empty_cache_is_refused_without_a_request(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"someone/tiny@main.*HF_HUB_OFFLINE"):
        fetch(MODEL, tmp_path, ignore)
    assert hub.requests == []


def test_a_file_that_shrank_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    folder = fetch(MODEL, tmp_path, ignore)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert is_complete(fetch(MODEL, tmp_path, ignore), MODEL)


def test_two_that_want_the_same_model_fetch_it_once(hub: Hub, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: fetch(MODEL, tmp_path, ignore), range(2)))
    assert folders[0] == folders[1]
    assert len(hub.ranges()) == 1


def test_a_cache_that_cannot_be_written_is_said(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="SPECOPS_CACHE_DIR"):
        fetch(MODEL, tmp_path, ignore)
