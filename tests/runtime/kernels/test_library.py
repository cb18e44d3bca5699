"""The library is built with the project, everywhere, or the installation says what is missing."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from specops.runtime import kernels

ROOT = Path(__file__).resolve().parents[3]


def test_it_computes_with_the_best_that_the_processor_has() -> None:
    flags: set[str] = set()
    if platform.system() == "Linux":
        flags = {*Path("/proc/cpuinfo").read_text().split()}
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    needs = {
        "AVX512-VNNI": {*avx512, "avx512_vnni"},
        "AVX-VNNI": {"avx2", "f16c", "avx_vnni"},
        "AVX-512": avx512,
        "AVX2": {"avx2", "f16c"},
        "NEON-I8MM": {"asimddp", "i8mm"},
        "NEON-DOTPROD": {"asimddp"},
        "plain C": set[str](),
    }
    if platform.system() == "Linux":
        assert tuple(name for name, words in needs.items() if words <= flags) == kernels.NAMES
    assert kernels.kernel() == kernels.NAMES[0]


def test_what_the_processor_has_can_be_forced() -> None:
    best = kernels.kernel()
    try:
        for name in kernels.NAMES:
            kernels.force(name)
            assert kernels.kernel() == name
        with pytest.raises(ValueError, match="abacus"):
            kernels.force("abacus")
    finally:
        kernels.force(None)
    assert kernels.kernel() == best


def build(compiler: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("setuptools")
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "-b", str(folder), "-t", str(folder)],
        cwd=ROOT,
        env={**os.environ, "CC": compiler, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_where_nothing_compiles_the_installation_says_what_to_do(
    tmp_path: Path, compiler: str
) -> None:
    done = build(compiler, tmp_path)
    assert done.returncode != 0
    assert f"{compiler} -std=c11" in done.stdout
    assert "pip install ziglang" in done.stderr
    assert "CC=gcc" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_zig_compiles_for_every_processor(tmp_path: Path) -> None:
    """Left alone it compiles for the one that it runs on, and the library fails on others."""
    assert "-mcpu=baseline" in build("false zig", tmp_path).stdout


def test_another_target_than_there_is_is_refused(tmp_path: Path) -> None:
    done = build("false", tmp_path, SPECOPS_TARGET="amiga")
    assert done.returncode != 0
    assert "amiga: it is none of linux-x86_64, linux-arm64, macos-arm64" in done.stderr


def test_a_library_for_macos_is_compiled_here(tmp_path: Path) -> None:
    """It cannot be loaded here: it is one of arm64's for macOS, and has what Python calls."""
    pytest.importorskip("ziglang")
    zig = f"{sys.executable} -m ziglang cc"
    done = build(zig, tmp_path, SPECOPS_TARGET="macos-arm64")
    assert done.returncode == 0, done.stderr
    (library,) = tmp_path.rglob("_native.so")
    content = library.read_bytes()
    magic, cpu = struct.unpack_from("<Ii", content)
    assert (magic, cpu) == (0xFEEDFACF, 0x0100000C)  # Mach-O of 64 bits, arm64
    for name in ("RegisterCustomOps", "specops_kernel_of", "specops_filter", "specops_look_up"):
        assert f"_{name}".encode() in content
    for name in (b"@rpath/_native.so", b"/usr/lib/libSystem", b"hw.optional.arm.FEAT_I8MM"):
        assert name in content


def test_multiplications_are_never_fused_with_additions(tmp_path: Path) -> None:
    command = build("false", tmp_path).stdout.splitlines()[-1]
    assert "-ffp-contract=off" in command
    assert "fast-math" not in command


def test_a_library_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"missing\.so cannot be loaded.*pip install"):
        kernels._load(tmp_path / "missing.so")


def test_a_library_of_something_else_is_told(tmp_path: Path) -> None:
    library = tmp_path / "damaged.so"
    library.write_bytes(b"no library")
    with pytest.raises(ImportError, match=r"damaged\.so cannot be loaded.*pip install"):
        kernels._load(library)
