"""Fixtures: a hub with a tiny model in this process, and child processes that get killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
def kill_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_child: None
) -> Callable[[str], None]:
    """A function: processes that run this module are killed at their start."""

    def kill(module: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(
            "import os, signal, sys\n"
            f"if {module!r} in sys.orig_argv:\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return kill


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the tiny Llama; this process downloads from it."""
    with serving(Hub({REPO: folder_files(checkpoint)})) as running:
        download_from(running, monkeypatch)
        yield running
