"""The library builds for every target, or the installation says what is missing."""

import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from specops.runtime import kernels

ROOT = Path(__file__).resolve().parents[3]


def test_the_fastest_kernels_for_this_processor_are_chosen() -> None:
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
        found = [name for name, words in needs.items() if words <= flags]
        assert tuple(found) == kernels.NAMES
    assert kernels.kernel() == kernels.NAMES[0]


def test_kernels_can_be_forced() -> None:
    for name in kernels.NAMES:
        kernels.force(name)
        assert kernels.kernel() == name
    with pytest.raises(ValueError, match="abacus"):
        kernels.force("abacus")
    kernels.force(None)
    assert kernels.kernel() == kernels.NAMES[0]


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


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler", "false zig"])
def test_without_a_compiler_the_installation_says_what_to_do(tmp_path: Path, compiler: str) -> None:
    done = build(compiler, tmp_path)
    assert done.returncode != 0
    command, *_ = [line for line in done.stdout.splitlines() if line.startswith(f"{compiler} ")]
    assert "-ffp-contract=off" in command  # no multiplication is fused with an addition
    assert "fast-math" not in command
    # Left alone, zig compiles for the processor that it runs on, and the library fails on others.
    assert ("-mcpu=baseline" in command) == ("zig" in compiler)
    assert "pip install ziglang" in done.stderr
    assert "CC=gcc" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_an_unknown_target_is_refused(tmp_path: Path) -> None:
    done = build("false", tmp_path, KERNELS_TARGET="amiga")
    assert done.returncode != 0
    assert "amiga: it is none of linux-x86_64, linux-arm64, macos-arm64" in done.stderr


def test_a_library_for_macos_is_compiled_here(tmp_path: Path) -> None:
    """It cannot be loaded here; the test looks at its header and its symbols."""
    pytest.importorskip("ziglang")
    zig = f"{sys.executable} -m ziglang cc -DSMALL_GROUPS=1"
    done = build(zig, tmp_path, KERNELS_TARGET="macos-arm64")
    assert done.returncode == 0, done.stderr
    (library,) = tmp_path.rglob("_native.so")
    content = library.read_bytes()
    magic, cpu = struct.unpack_from("<Ii", content)
    assert (magic, cpu) == (0xFEEDFACF, 0x0100000C)  # Mach-O of 64 bits, arm64
    for name in ("RegisterCustomOps", "specops_kernel_of", "specops_filter", "specops_look_up"):
        assert f"_{name}".encode() in content
    for name in (b"@rpath/_native.so", b"/usr/lib/libSystem", b"hw.optional.arm.FEAT_I8MM"):
        assert name in content


@pytest.mark.parametrize("content", [None, b"no library"])
def test_a_missing_or_damaged_library_is_reported(tmp_path: Path, content: bytes | None) -> None:
    library = tmp_path / "other.so"
    if content is not None:
        library.write_bytes(content)
    with pytest.raises(ImportError, match=r"other\.so cannot be loaded.*pip install"):
        kernels._load(library)
