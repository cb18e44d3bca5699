"""Paths that a repository's file names stay inside its folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specops.models.convert.checkpoint import Checkpoint
from specops.models.errors import ModelError
from specops.models.layout import parts_of
from specops.models.paths import path_inside
from tests.checkpoints import make_llama_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder beside a secret."""
    made = tmp_path / "model"
    (made / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (made / "own").write_text("own")
    return made


@pytest.mark.parametrize("name", ["own", "not there", "sub/own", "./own", "..own", "a..b"])
def test_names_in_the_folder(folder: Path, name: str) -> None:
    assert path_inside(folder, name) == folder / name


OUTSIDE = ["../secret", "sub/../../secret", "/etc/hostname", "..", ".", "", "sub/..", "sub/../own"]
IMPOSSIBLE = ["a\0b", "x" * 300, "\ud800", "sub/" * 2000]


@pytest.mark.parametrize("name", [*OUTSIDE, *IMPOSSIBLE])
def test_other_names_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is not a file in the folder"):
        path_inside(folder, name)


def test_links_lead_to_the_folder_only(folder: Path, tmp_path: Path) -> None:
    (folder / "within").symlink_to("own")
    assert path_inside(folder, "within").read_text() == "own"
    (tmp_path / "way").symlink_to(folder)  # the folder itself may be named by any link
    assert path_inside(tmp_path / "way", "within").read_text() == "own"
    (folder / "out").symlink_to("../secret")
    (folder / "further").symlink_to("out")
    (folder / "sub" / "up").symlink_to("/")
    for name in ("out", "further", "sub/up/etc/hostname"):
        with pytest.raises(ValueError, match="which is outside of the folder"):
            path_inside(folder, name)
    (folder / "circle").symlink_to("circle")
    with pytest.raises(ValueError, match="is not a file in the folder"):
        path_inside(folder, "circle")


def test_a_snapshot_of_a_hub_cache_links_to_its_own_blobs(tmp_path: Path) -> None:
    """As huggingface_hub lays it out; links to another repository's blobs are refused."""
    snapshots = {}
    for name in ("models--org--a", "models--org--b", "project"):
        (tmp_path / name / "blobs").mkdir(parents=True)
        (tmp_path / name / "blobs" / "1234").write_text(name)
        snapshots[name] = tmp_path / name / "snapshots" / "c0ffee"
        (snapshots[name] / "onnx").mkdir(parents=True)
    snapshot = snapshots["models--org--a"]
    (snapshot / "model.onnx").symlink_to("../../blobs/1234")
    (snapshot / "onnx" / "model.onnx").symlink_to("../../../blobs/1234")
    assert path_inside(snapshot, "model.onnx").read_text() == "models--org--a"
    assert path_inside(snapshot / "onnx", "model.onnx").read_text() == "models--org--a"
    (snapshot / "other").symlink_to("../../../models--org--b/blobs/1234")
    (snapshots["project"] / "model.onnx").symlink_to("../../blobs/1234")
    for place, name in ((snapshot, "other"), (snapshots["project"], "model.onnx")):
        with pytest.raises(ValueError, match="which is outside of the folder"):
            path_inside(place, name)


# -- every file that names other files -------------------------------------------------------------


def read(folder: Path) -> None:
    Checkpoint(folder)


def arranged(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    parts_of(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "", "sub/x"])
@pytest.mark.parametrize(
    ("index", "use", "error"),
    [
        ("model.safetensors.index.json", read, ModelError),
        ("pytorch_model.bin.index.json", arranged, ModelError),
    ],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(
    tmp_path: Path, index: str, use: Callable[[Path], None], error: type[Exception], name: str
) -> None:
    make_llama_checkpoint(tmp_path / "other")
    source = make_llama_checkpoint(tmp_path / "model", shards=2)
    (source / index).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(error, match=r"index\.json.*is not a file"):
        use(source)


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_that_are_links_out_of_the_folder_are_refused(tmp_path: Path, shards: int) -> None:
    source = make_llama_checkpoint(tmp_path / "model", shards=shards)
    file = max(source.glob("*.safetensors"))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="which is outside of the folder"):
        Checkpoint(source)


def test_shards_of_a_gguf_are_no_links_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"GGUF")
    names = [f"model-0000{one}-of-00002.gguf" for one in (1, 2)]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / names[0]).write_bytes(b"GGUF")
    (tmp_path / "model" / names[1]).symlink_to("../secret")
    with pytest.raises(ModelError, match="which is outside of the folder"):
        parts_of(tmp_path / "model" / names[0])
