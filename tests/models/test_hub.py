"""Downloads: what comes is whole and checked, what fails says why, what is here is not fetched."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from specops.config import Settings
from specops.engine import Download, Engine, ModelState, Report
from specops.metrics import Metrics
from specops.models import download
from specops.models.hub import HubModel, fetch, is_complete
from specops.models.prepare import ModelError, prepare
from specops.request import GenerationRequest
from specops.service import Service
from tests.checkpoints import make_llama_checkpoint
from tests.models.hub_server import COMMIT, Hub, download_from, folder_files, serving

REPO = "someone/tiny"
MODEL = HubModel(REPO)
NEEDED = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, with files beside it that nobody needs."""
    folder = make_llama_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", vocab=300)
    for name in ("README.md", "pytorch_model.bin", "flax_model.msgpack", "onnx/model.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not needed")
    return folder


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the tiny Llama; this process downloads from it."""
    with serving(Hub({REPO: folder_files(checkpoint)})) as running:
        download_from(running, monkeypatch)
        yield running


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def ignore(done: int, total: int) -> None:
    """Take no notice of progress."""


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


def test_only_what_is_needed_is_downloaded(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    folder = fetch(MODEL, tmp_path, ignore)
    assert names(folder) == NEEDED | {"download.json"}
    for name in NEEDED:
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    assert json.loads((folder / "download.json").read_text())["commit"] == COMMIT


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


def test_a_missing_repository_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no no/model@main \(404\)"):
        fetch(HubModel("no/model"), tmp_path, ignore)


def test_a_missing_revision_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"someone/tiny has no revision v9"):
        fetch(HubModel(REPO, "v9"), tmp_path, ignore)


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


def test_a_refusal_is_not_asked_again(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        fetch(HubModel("no/model"), tmp_path, ignore)
    assert len(hub.requests) == 1


def test_a_hub_that_is_not_there_is_said(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"cannot be reached.*HF_ENDPOINT"):
        fetch(MODEL, tmp_path, ignore)


def test_a_repository_without_usable_weights_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repos["someone/flax"] = {"config.json": b"{}", "flax_model.msgpack": b"x"}
    with pytest.raises(ModelError, match="neither safetensors nor PyTorch"):
        fetch(HubModel("someone/flax"), tmp_path, ignore)


def test_the_folders_of_a_repository_with_several_graphs_are_listed(
    hub: Hub, tmp_path: Path
) -> None:
    graph = {"genai_config.json": b"{}", "model.onnx": b"x", "model.onnx.data": b"y"}
    files = {
        f"{at}/{name}": body for at in ("cpu/int4", "cuda/fp16") for name, body in graph.items()
    }
    hub.repos["someone/onnx"] = files
    with pytest.raises(ModelError, match=r"someone/onnx@main:cpu/int4; there are .*cuda/fp16"):
        fetch(HubModel("someone/onnx"), tmp_path, ignore)
    folder = fetch(HubModel("someone/onnx", "main", "cpu/int4"), tmp_path, ignore)
    assert names(folder) == {*graph, "download.json"}


def test_sharded_weights_come_with_their_index(hub: Hub, tmp_path: Path) -> None:
    shards = folder_files(make_llama_checkpoint(tmp_path / "source", vocab=300, shards=2))
    hub.repos["someone/sharded"] = shards
    folder = fetch(HubModel("someone/sharded"), tmp_path, ignore)
    assert names(folder) == {*shards, "download.json"}


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, which takes the right to mount one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


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


def test_a_cache_that_cannot_be_written_is_said(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match="SPECOPS_CACHE_DIR"):
        fetch(MODEL, tmp_path, ignore)


def test_a_repository_with_weights_of_torch_alone_is_taken(hub: Hub, tmp_path: Path) -> None:
    files = {
        "config.json": b"{}",
        "vocab.json": b"{}",
        "merges.txt": b"#",
        "pytorch_model.bin": b"x",
    }
    hub.repos["someone/old"] = {**files, "tf_model.h5": b"x", "flax_model.msgpack": b"x"}
    assert names(fetch(HubModel("someone/old"), tmp_path, ignore)) == {*files, "download.json"}


# -- what can be seen of it ----------------------------------------------------------------------


def test_a_download_shows_in_health_and_in_the_metrics(tiny_settings: Settings) -> None:
    go_on = threading.Event()

    def load(settings: Settings, report: Report) -> Engine:
        for done in (0, 600, 2000):
            report(ModelState.DOWNLOADING, f"{done} bytes", Download("draft", done, 2000))
        assert go_on.wait(30)
        return Engine.load(settings, report)

    async def scenario() -> None:
        metrics = Metrics()
        service = Service(tiny_settings, metrics, load)
        service.start()
        async with asyncio.timeout(60):
            while service.detail != "2000 bytes":
                await asyncio.sleep(0.001)
            assert service.state is ModelState.DOWNLOADING
            value = metrics.registry.get_sample_value
            for name in ("specops_download_bytes", "specops_download_total_bytes"):
                assert value(name, {"model": "draft"}) == 2000
                assert value(name, {"model": "target"}) == 0
            assert value("specops_model_state", {"state": "downloading"}) == 1
            go_on.set()
            while service.state is not ModelState.READY:
                await asyncio.sleep(0.001)
        await service.stop()

    asyncio.run(scenario())


def test_bytes_of_an_unknown_model_are_refused() -> None:
    with pytest.raises(ValueError, match="no such model"):
        Metrics().set_download("another", 1, 2)


# -- from the hub to tokens --------------------------------------------------------------------


def test_a_model_of_the_hub_is_converted_once_and_then_needs_nobody(
    hub: Hub, tmp_path: Path
) -> None:
    said: list[str] = []
    told: list[tuple[str, int, int]] = []

    def get() -> Path:
        return prepare(
            MODEL,
            "int8-32",
            name="tiny",
            cache_dir=tmp_path,
            report=said.append,
            downloading=lambda *progress: told.append(progress),
        ).path

    first = get()
    assert said == ["converting someone/tiny@main to int8-32"]
    assert told[-1][1] == told[-1][2] > 0
    assert "someone/tiny@main" in told[-1][0]
    hub.requests.clear()
    assert get() == first
    assert hub.requests == []
    assert len(said) == 1


def test_from_the_hub_to_tokens(hub: Hub, tiny_settings: Settings, tmp_path: Path) -> None:
    hub.repos["someone/draft"] = hub.repos[REPO]
    settings = replace(
        tiny_settings, target=REPO, draft="someone/draft@main", quant="int8-32", cache_dir=tmp_path
    )
    seen: list[tuple[ModelState, str | None]] = []

    def report(state: ModelState, detail: str, download: Download | None = None) -> None:
        seen.append((state, download.model if download else None))

    engine = Engine.load(settings, report)
    assert (engine.info.name, engine.info.drafters[0]) == ("tiny", "draft")
    order = list(dict.fromkeys(seen))
    assert order == [
        (ModelState.DOWNLOADING, "target"),
        (ModelState.CONVERTING, None),
        (ModelState.DOWNLOADING, "draft"),
        (ModelState.LOADING, None),
    ]
    request = GenerationRequest(
        request_id="x", prompt_tokens=engine.encode("def add"), max_new_tokens=4, ignore_eos=True
    )
    pieces = [piece for output in engine.generate(request) for piece in output.pieces]
    assert len(pieces) == 4
