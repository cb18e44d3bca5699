"""Every processor's kernels compute what plain C does, and what x86-64 does: arm64 in an emulator.

`tests/fuzz/kernels.c` is compiled for each kind of processor and run. It makes cases of products,
attention, norms, sampling and suffixes, right and wrong, computes each with all kernels, and tells
a digest of what came out.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from specops.runtime import kernels
from tests.fuzz import kernels as fuzz

ROOT = Path(__file__).resolve().parents[3]
CASES = 1500  # three tenths of them products, as many attention, a tenth norms
AVX2, AVX512, VNNI512, VNNI256, DOTPROD, I8MM, AMX = (1 << bit for bit in range(7))  # processor.h
BY_PLAIN_C = "AMX-INT8 by plain C"

needs_zig = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="no zig to compile for other processors"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda kind: fuzz.build(tmp_path_factory.mktemp(kind), kind))


def run(*command: str) -> tuple[list[str], str]:
    """Names of the kernels that were compared, plain C first, and the digest."""
    done = subprocess.run(
        [*command, str(CASES), "0", "2024"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, names, digest = done.stdout.splitlines()
    return names.split(", "), digest


def emulator(kind: str) -> list[str]:
    if found := shutil.which(f"qemu-{kind}") or shutil.which(f"qemu-{kind}-static"):
        return [found, "-cpu"]
    pytest.skip(f"no qemu-{kind}, of Debian's package qemu-user, to run it")


@needs_zig
@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("max", ["plain C", "NEON-DOTPROD", "NEON-I8MM"]),
        ("cortex-a76", ["plain C", "NEON-DOTPROD"]),
        ("cortex-a72", ["plain C"]),
    ],
)
def test_arm64_computes_the_same_bits(program, model: str, names: list[str]) -> None:
    here = platform.machine() == "x86_64"
    command = [*emulator("aarch64"), model, str(program("aarch64"))]
    found, digest = run(*command)
    assert found == names
    expected = run(str(program("x86_64")))[1] if here else digest
    assert digest == expected


@needs_zig
def test_x86_64_computes_the_same_bits_whatever_it_has(program) -> None:
    command = [*emulator("x86_64")]
    digests = {}
    for model, names in {"Nehalem": ["plain C"], "Haswell": ["plain C", "AVX2"]}.items():
        found, digests[model] = run(*command, model, str(program("x86_64")))
        assert found == [*names, BY_PLAIN_C]
    assert len({*digests.values()}) == 1


@needs_zig
@pytest.mark.skipif(platform.machine() != "x86_64", reason="not this processor")
def test_this_machine_computes_the_same_bits_with_all_it_has(program) -> None:
    names, _ = run(str(program("x86_64")))
    assert {*kernels.NAMES} <= {*names}
    assert BY_PLAIN_C in names
    if "AVX512-VNNI" in names:  # the source of AVX-VNNI's kernel, with AVX-512's instructions
        assert "AVX-VNNI by EVEX" in names


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="not this processor")
@pytest.mark.parametrize(
    ("features", "names"),
    [
        (0, ["plain C"]),
        (AVX2, ["AVX2", "plain C"]),
        (AVX2 | VNNI256, ["AVX-VNNI", "AVX2", "plain C"]),  # Alder Lake
        (AVX2 | AVX512, ["AVX-512", "AVX2", "plain C"]),  # Skylake-X
        (AVX2 | AVX512 | VNNI512, ["AVX512-VNNI", "AVX-512", "AVX2", "plain C"]),  # Zen 4
        (
            AVX2 | AVX512 | VNNI512 | VNNI256,  # Zen 5, Sapphire Rapids without AMX
            ["AVX512-VNNI", "AVX-VNNI", "AVX-512", "AVX2", "plain C"],
        ),
        (
            AVX2 | AVX512 | VNNI512 | VNNI256 | AMX,  # Sapphire Rapids
            ["AMX-INT8", "AVX512-VNNI", "AVX-VNNI", "AVX-512", "AVX2", "plain C"],
        ),
        (AVX2 | AMX, ["AVX2", "plain C"]),
        (VNNI512 | VNNI256, ["plain C"]),  # what a careless hypervisor leaves
    ],
)
def test_kernels_follow_from_what_the_processor_says(features: int, names: list[str]) -> None:
    assert list(kernels.names_for(features)) == names


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ((0, 1, 1, 0, 0), b""),  # nothing to say: the processor does not name it
        ((1, 0, 1, 0, 0), b"there is no AVX512-VNNI for passes of few tokens"),
        ((1, 1, 0, 0, 0), b"the system does not save its registers"),
        ((1, 1, 1, 0, 0), b"the system does not permit it (arch_prctl)"),
        ((1, 1, 1, 1, 0), b"it computed something else than plain C when it was tested"),
        ((1, 1, 1, 1, 1), None),
    ],
)
def test_why_amx_is_not_used_is_told(found: tuple[int, ...], reason: bytes | None) -> None:
    """Found: named, AVX512-VNNI, registers saved, permitted, right when tested."""
    assert kernels.library.specops_amx_refusal(*found) == reason


def test_where_amx_computes_or_is_not_there_nothing_is_told() -> None:
    named = "amx_int8" in Path("/proc/cpuinfo").read_text() if Path("/proc").exists() else False
    assert bool(kernels.no_amx()) == (named and "AMX-INT8" not in kernels.NAMES)


def test_the_reason_stands_behind_the_kernels_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "no_amx", lambda: "the system does not save its registers")
    name = kernels.kernel()
    assert kernels.described() == f"{name}; not AMX-INT8: the system does not save its registers"
    monkeypatch.setattr(kernels, "no_amx", lambda: "")
    assert kernels.described() == name


def instructions(kind: str, variant: str, folder: Path) -> str:
    """What the products' kernel is compiled to."""
    setup = fuzz._build_script()
    source, flags = setup.objects(kind)[f"matmul_{variant}"]
    assembly = folder / "kernel.s"
    compiler = [fuzz.sys.executable, "-m", "ziglang", "cc", "-target", f"{kind}-linux-musl"]
    arguments = (*setup.FLAGS, *flags, "-S", str(ROOT / setup.KERNELS / f"{source}.c"))
    command = setup.command_of(*arguments, "-o", str(assembly), compiler=compiler)
    subprocess.run(command, check=True, capture_output=True)
    return assembly.read_text()


@needs_zig
@pytest.mark.parametrize(
    ("kind", "variant", "wanted", "never"),
    [
        ("x86_64", "vnni256", r"\{vex\}\s+vpdpbusd\s.*%ymm", r"%zmm|%k[0-7]|%ymm(1[6-9]|[23]\d)"),
        ("x86_64", "vnni512", r"vpdpbusd\s.*%zmm", r"vfn?m(add|sub)"),
        ("x86_64", "amx", r"tdpbsud\s+%tmm6, %tmm3, %tmm0", r"vpdpbusd|vfn?m(add|sub)"),
        ("x86_64", "avx512", r"vpmaddubsw\s.*%zmm", r"vpdpbusd|vfn?m(add|sub)"),
        ("x86_64", "avx2", r"vpmaddubsw\s.*%ymm", r"vpdpbusd|%zmm|vfn?m(add|sub)"),
        ("x86_64", "plain", r"pmaddwd\s.*%xmm", r"%ymm|pmaddubsw"),
        ("aarch64", "dotprod", r"\bsdot\s", r"usdot|smmla|\bfml[as]\b|\bfn?madd\b"),
        ("aarch64", "i8mm", r"\busmmla\s", r"\bfml[as]\b|\bfn?madd\b"),
        ("aarch64", "plain", r"\bsmlal2?\s", r"[su]dot|smmla|\bfml[as]\b|\bfn?madd\b"),
    ],
)
def test_instructions_are_those_of_the_processor(
    tmp_path: Path, kind: str, variant: str, wanted: str, never: str
) -> None:
    """AVX-VNNI's are encoded as a processor without AVX-512 knows them; nothing is fused."""
    text = instructions(kind, variant, tmp_path)
    assert re.search(wanted, text)
    assert not re.search(never, text)
