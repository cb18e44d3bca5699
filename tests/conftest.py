"""Small models with random weights, made once per test run: real graphs, no talent."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from specops.config import Settings
from specops.models.convert import Quantization, export_checkpoint
from specops.runtime import calibration
from specops.runtime.session import share_threads
from tests.checkpoints import make_llama_checkpoint

THREADS = 1  # each worker of pytest has a core; tests of threads start processes of their own
SLOTS = 3
CONTEXT = 128

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and ends.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def threads_of_the_process() -> None:
    """ONNX Runtime has one pool of threads for a process, if its first session asks for one."""
    share_threads(THREADS)


@pytest.fixture(scope="session", autouse=True)
def short_calibration() -> Iterator[None]:
    """Three rounds and no more: tests compare tokens, and those follow from no measured time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_ENOUGH_SECONDS", 0.0)
        yield


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `target` and `draft` of one vocabulary, with exports in `onnx/`."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = {"heads": 4, "kv_heads": 2, "vocab": 320, "context": CONTEXT, "tie": True}
    make_llama_checkpoint(folder / "target", hidden=256, layers=2, ffn=384, seed=1, **shape)
    # The draft is the target's bottom: related, so that some draft tokens are right and some wrong.
    make_llama_checkpoint(folder / "draft", hidden=128, layers=1, ffn=256, seed=1, **shape)
    for model in ("target", "draft"):
        for quant in ("fp32", "int8-128", "int4-128-rtn", "int4-32-rtn"):
            export_checkpoint(
                folder / model,
                folder / model / "onnx" / quant,
                quantization=Quantization.parse(quant),
            )
    return folder


@pytest.fixture(scope="session")
def tiny_settings(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings that load the tiny pair."""
    return Settings(
        target=str(tiny_pair / "target"),
        draft=str(tiny_pair / "draft"),
        quant="int8-128",
        cache_dir=tmp_path_factory.mktemp("cache"),
        threads=THREADS,
        slots=SLOTS,
        max_batched_tokens=16,
        queue_size=4,
    )
