"""All kernels of all processors compute the same bits; those of arm64 run in an emulator.

The tests compile `tests/fuzz/kernels.c` for each kind of processor and run it. The program makes
cases of products, attention, convolutions, recurrences, norms, sampling, suffixes, draft lengths
and quantization, right and wrong. It computes each with all kernels and prints a digest of the
results.
`make check` sets `KERNEL_CASES`: more cases, and groups of all numbers of rows.
"""

import importlib.util
import os
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
# Three of fourteen are products, three attention, two sampling, one each of the others.
CASES = int(os.environ.get("KERNEL_CASES", "500"))
FEWER = 500  # of a processor without kernels of its own: another one runs them in all cases
AVX2, AVX512, VNNI512, VNNI256, DOTPROD, I8MM = (1 << bit for bit in range(6))  # processor.h
BY_PLAIN_C = [f"{name} by plain C" for name in ("AVX-512", "AVX512-VNNI")]
EVEX = r"%zmm|%k[0-7]|%ymm(1[6-9]|[23]\d)"  # registers that AVX-512 alone has
LIBC = {"aarch64": "libc6-arm64-cross", "x86_64": "libc6-amd64-cross"}  # Debian's packages

needs_zig = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="no zig to compile for other processors"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda kind: fuzz.build(tmp_path_factory.mktemp(kind), kind))


@cache
def run(cases: int, *command: str) -> tuple[list[str], str]:
    """Names of the compared kernels, plain C first, and the digest."""
    done = subprocess.run(
        [*command, str(cases), "0", "2024"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, names, digest = done.stdout.splitlines()
    return names.split(", "), digest


def emulator(kind: str) -> list[str]:
    found = shutil.which(f"qemu-{kind}") or shutil.which(f"qemu-{kind}-static")
    if found is None:
        pytest.skip(f"no qemu-{kind}, of Debian's package qemu-user, to run it")
    if kind == platform.machine():
        return [found, "-cpu"]
    libraries = Path(f"/usr/{kind}-linux-gnu")
    if not (libraries / "lib").exists():
        pytest.skip(f"no C library of {kind}, of Debian's package {LIBC[kind]}, to run it with")
    return [found, "-L", str(libraries), "-cpu"]


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
    cases = CASES if model == "max" else FEWER
    found, digest = run(cases, *emulator("aarch64"), model, str(program("aarch64")))
    assert found == names
    if platform.machine() == "x86_64":
        assert digest == run(cases, str(program("x86_64")))[1]


@needs_zig
def test_older_x86_64_computes_the_same_bits(program) -> None:
    digests = set()
    for model, names in {"Nehalem": ["plain C"], "Haswell": ["plain C", "AVX2"]}.items():
        found, digest = run(FEWER, *emulator("x86_64"), model, str(program("x86_64")))
        assert found == [*names, *BY_PLAIN_C]
        digests.add(digest)
    assert len(digests) == 1


@needs_zig
@pytest.mark.skipif(platform.machine() != "x86_64", reason="not this processor")
def test_this_machine_computes_the_same_bits_with_all_its_kernels(program) -> None:
    names, _ = run(CASES, str(program("x86_64")))
    assert {*kernels.NAMES} <= {*names}
    assert {*BY_PLAIN_C} <= {*names}
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
            AVX2 | AVX512 | VNNI512 | VNNI256,  # Zen 5, Sapphire Rapids
            ["AVX512-VNNI", "AVX-VNNI", "AVX-512", "AVX2", "plain C"],
        ),
        (VNNI512 | VNNI256, ["plain C"]),  # of a careless hypervisor
    ],
)
def test_kernels_follow_from_the_features_of_the_processor(features: int, names: list[str]) -> None:
    assert list(kernels.names_for(features)) == names


def instructions(kind: str, variant: str, folder: Path) -> str:
    """The assembly of a kernel."""
    setup = fuzz.build_script()
    source, flags = setup.objects(kind)[variant]
    assembly = folder / "kernel.s"
    flags = (*setup.FLAGS, *flags, "-DSMALL_GROUPS=2")
    arguments = (*flags, "-S", str(ROOT / setup.KERNELS / f"{source}.c"))
    command = setup.command_of(*arguments, "-o", str(assembly), compiler=fuzz.zig(kind))
    subprocess.run(command, check=True, capture_output=True)
    return assembly.read_text(encoding="latin-1")  # comments hold bytes of constants


@needs_zig
@pytest.mark.parametrize(
    ("kind", "variant", "wanted", "never"),
    [
        ("x86_64", "attention_vnni256", r"\{vex\}\s+vpdpbusd\s.*%ymm", rf"{EVEX}|vfn?m(add|sub)"),
        ("x86_64", "attention_vnni512", r"vpdpbusd\s.*%zmm", r"vfn?m(add|sub)"),
        ("x86_64", "attention_avx512", r"vpmaddwd\s.*%zmm", r"vpdpbusd|vfn?m(add|sub)"),
        ("x86_64", "attention_avx2", r"vpmaddwd\s.*%ymm", rf"vpdpbusd|{EVEX}|vfn?m(add|sub)"),
        ("x86_64", "attention_plain", r"pmaddwd\s.*%xmm", r"%ymm"),
        ("aarch64", "attention_dotprod", r"\bsdot\s", r"usdot|smmla|\bfml[as]\b|\bfn?madd\b"),
        ("aarch64", "attention_plain", r"\bsmull2?\s", r"[su]dot|\bfml[as]\b|\bfn?madd\b"),
        ("x86_64", "matmul_vnni256", r"\{vex\}\s+vpdpbusd\s.*%ymm", EVEX),
        ("x86_64", "matmul_vnni512", r"vpdpbusd\s.*%zmm", r"vfn?m(add|sub)"),
        ("x86_64", "matmul_avx512", r"vpmaddubsw\s.*%zmm", r"vpdpbusd|vfn?m(add|sub)"),
        ("x86_64", "matmul_avx2", r"vpmaddubsw\s.*%ymm", r"vpdpbusd|%zmm|vfn?m(add|sub)"),
        ("x86_64", "matmul_plain", r"pmaddwd\s.*%xmm", r"%ymm|pmaddubsw"),
        ("aarch64", "matmul_dotprod", r"\bsdot\s", r"usdot|smmla|\bfml[as]\b|\bfn?madd\b"),
        ("aarch64", "matmul_i8mm", r"\busmmla\s", r"\bfml[as]\b|\bfn?madd\b"),
        ("aarch64", "matmul_plain", r"\bsmlal2?\s", r"[su]dot|smmla|\bfml[as]\b|\bfn?madd\b"),
    ],
)
def test_instructions_are_those_of_the_processor(
    tmp_path: Path, kind: str, variant: str, wanted: str, never: str
) -> None:
    """AVX-VNNI has the encoding without AVX-512; no instruction is fused."""
    text = instructions(kind, variant, tmp_path)
    assert re.search(wanted, text)
    assert not re.search(never, text)
