"""A hub that refuses or fails: the message says why and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from specops.models.hub import HubModel, fetch, is_complete
from specops.models.prepare import ModelError
from tests.models.hub_server import Hub
from tests.models.tiny_repo import MODEL, REPO, ignore


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


def test_terms_that_are_not_accepted_are_said(hub: Hub, tmp_path: Path) -> None:
    hub.status = 403
    with pytest.raises(ModelError, match=r"\(403\): accept its terms.*HF_TOKEN"):
        fetch(MODEL, tmp_path, ignore)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (HubModel("no/model"), r"no no/model@main \(404\)"),
        (HubModel(REPO, "v9"), r"someone/tiny has no revision v9"),
    ],
)
def test_what_is_not_there_is_named_and_not_asked_for_again(
    hub: Hub, tmp_path: Path, model: HubModel, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        fetch(model, tmp_path, ignore)
    assert len(hub.requests) == 1


def test_a_file_that_is_listed_but_not_there_is_an_error(hub: Hub, tmp_path: Path) -> None:
    hub.gone = "tokenizer.json"
    with pytest.raises(ModelError, match=r"someone/tiny@main \(404\)"):
        fetch(MODEL, tmp_path, ignore)
    assert not is_complete(MODEL.folder(tmp_path), MODEL)


def test_a_failing_hub_is_said(hub: Hub, tmp_path: Path) -> None:
    hub.status = 500
    with pytest.raises(ModelError, match=r"\(500\): start again later"):
        fetch(MODEL, tmp_path, ignore)
    assert len(hub.requests) == 6


def test_a_hub_that_is_busy_is_asked_again(hub: Hub, tmp_path: Path) -> None:
    hub.busy = 3
    assert is_complete(fetch(MODEL, tmp_path, ignore), MODEL)
    assert [path for _, path, _ in hub.requests[:4]] == [hub.requests[0][1]] * 4


def test_a_hub_that_is_not_there_is_said(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"cannot be reached.*HF_ENDPOINT"):
        fetch(MODEL, tmp_path, ignore)
