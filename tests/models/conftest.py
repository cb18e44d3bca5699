"""Fixtures: a hub with a tiny model in this process, and child processes that get killed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_llama_checkpoint
from tests.models.hub_server import Hub, download_from, folder_files, serving
from tests.models.tiny_repo import REPO


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, with files beside it that are not needed."""
    folder = make_llama_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", vocab=300)
    for name in ("README.md", "pytorch_model.bin", "flax_model.msgpack", "onnx/model.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not needed")
    return folder


@pytest.fixture
def killed_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_child: None) -> None:
    """Processes that run our modules are killed at their start."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'specops.models.child' in sys.orig_argv:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the tiny Llama; this process downloads from it."""
    with serving(Hub({REPO: folder_files(checkpoint)})) as running:
        download_from(running, monkeypatch)
        yield running
