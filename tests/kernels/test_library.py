"""The library is built with the project, and nothing breaks where it is not there."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specops import kernels
from specops.config import Settings
from specops.engine import NO_DRAFTER, Engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fresh() -> Iterator[None]:
    """The kernel is looked for anew, before and after."""
    kernels.kernel.cache_clear()
    yield
    kernels.kernel.cache_clear()


@pytest.mark.skipif(platform.system() != "Linux", reason="the processor's flags are unknown")
def test_it_is_built_and_has_a_kernel_where_the_processor_has_avx2() -> None:
    """Without this, all other tests of the kernels would be skipped and nobody would notice."""
    flags = Path("/proc/cpuinfo").read_text().split()
    assert (kernels.kernel() is not None) == ({"avx2", "fma"} <= set(flags))
    if "avx512_vnni" in flags:
        assert kernels.kernel() == "AVX512-VNNI"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="nothing is compiled here")
@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_where_nothing_compiles_the_project_is_installed_without(
    tmp_path: Path, compiler: str
) -> None:
    pytest.importorskip("setuptools")
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "-b", str(tmp_path), "-t", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{compiler} -std=c11" in done.stdout
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.usefixtures("fresh")
def test_without_a_library_onnxruntime_computes(
    tiny_settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "missing.so")
    with caplog.at_level(logging.INFO):
        engine = Engine.load(replace(tiny_settings, draft=NO_DRAFTER))
    assert engine.info.kernels == "onnxruntime"
    assert "missing.so was not built" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_a_library_that_cannot_be_loaded_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = tmp_path / "damaged.so"
    library.write_bytes(b"no library")
    monkeypatch.setattr(kernels, "LIBRARY", library)
    assert kernels.kernel() is None
    assert "computed by ONNX Runtime" in caplog.text


@pytest.mark.parametrize("choice", ["auto", "onnxruntime"])
def test_the_setting_chooses(tiny_settings: Settings, choice: str) -> None:
    engine = Engine.load(replace(tiny_settings, draft=NO_DRAFTER, kernels=choice))
    own = kernels.kernel() if choice == "auto" else None
    assert engine.info.kernels == (own or "onnxruntime")


def test_copied_weights_are_onnxruntimes(tiny_settings: Settings) -> None:
    engine = Engine.load(replace(tiny_settings, draft=NO_DRAFTER, prepack=False))
    assert engine.info.kernels == "onnxruntime"
