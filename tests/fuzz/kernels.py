"""Builds `kernels.c` with the kernels, under sanitizers, and runs it."""

import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from tests.fuzz.cases import FindingError

ROOT = Path(__file__).resolve().parents[2]
UNDEFINED = "-fsanitize=undefined"  # zig's compiler has this one only
ALL = "-fsanitize=address,undefined"
OPTIONS = {  # a program that aborts prints its seed
    "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
    "ASAN_OPTIONS": "quarantine_size_mb=4:abort_on_error=1",
}
FLAGS = ("-g", "-O1", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("specops_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def zig(kind: str) -> list[str]:
    """zig's compiler for a kind of processor, and for the system that the wheels are made for.

    That system has glibc, of which zig has stubs in 6 seconds; to make musl takes it a minute.
    """
    targets = build_script().TARGETS.values()
    (target,) = (found for machine, found, _ in targets if machine == kind and "-linux-" in found)
    return [sys.executable, "-m", "ziglang", "cc", "-target", target]


def _compiler(setup: ModuleType, folder: Path) -> list[str]:
    """gcc or clang if it has both sanitizers, else the compiler that builds the kernels."""
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    for command in (["gcc", ALL], ["clang", ALL]):
        with suppress(OSError, subprocess.CalledProcessError):
            arguments = [*command, str(probe), "-o", str(folder / "probe")]
            subprocess.run(arguments, check=True, capture_output=True)
            return command
    print("neither gcc nor clang has an address sanitizer here: undefined behaviour alone")
    return [*setup.compiler(), UNDEFINED]


def build(folder: Path, foreign: str | None = None) -> Path:
    """Compile the program, each kernel with its own flags.

    Args:
        folder: for the program.
        foreign: kind of processor to compile for by zig, without sanitizers, so that an emulator
            can run the program; None: this machine.
    """
    # To compile groups of many rows takes long, with sanitizers minutes.
    setup, few = build_script(), "-DSMALL_GROUPS=4"
    kind = foreign or setup.machine()
    if foreign is None:
        command, checks = _compiler(setup, folder), (*FLAGS, few)
    else:
        all_groups = kind == setup.machine() and "KERNEL_CASES" in os.environ
        command, checks = zig(foreign), ("-O1", *(() if all_groups else ("-DSMALL_GROUPS=3",)))
    objects = setup.objects(kind)
    if kind == "x86_64":
        evex = (*setup.AVX512, "-mavx512vnni", "-DHALF_REGISTERS", few)
        emulated = ("-include", str(Path(__file__).with_name("avx512.h")), few)
        for name, source, flags in (
            ("EVEX", "dots", evex),
            ("AVX512_BY_C", "pairs", (*emulated, "-DPAIRS_ALONE")),
            ("VNNI512_BY_C", "dots", emulated),
        ):
            for kernel, file in (("matmul", f"matmul_{source}"), ("attention", "attention_kernel")):
                own = f"{kernel}_{name}".upper()
                objects[own.lower()] = (file, (*flags, f"-D{kernel.upper()}={own}"))
    sources = {
        name: (ROOT / setup.KERNELS / f"{source}.c", flags)
        for name, (source, flags) in objects.items()
    }
    sources["fuzz"] = (Path(__file__).with_suffix(".c"), ("-I", str(ROOT / setup.KERNELS)))

    def compiled(name: str) -> str:
        source, flags = sources[name]
        made = str(folder / f"{name}.o")
        arguments = (*setup.FLAGS, *setup.WARNINGS, *checks, *flags, "-c", str(source), "-o", made)
        _call(*setup.command_of(*arguments, compiler=command))
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compiled, sources))
    program = folder / "kernels"
    arguments = (*checks, *made, "-lm", "-pthread", "-o", str(program))
    _call(*setup.command_of(*arguments, compiler=command))
    return program


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"


def fuzz(cases: int, seconds: float, seed: int) -> str:
    """Run the program, which prints what it did or which seed fails.

    Raises:
        FindingError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [str(build(Path(folder))), str(cases), str(round(seconds)), str(seed)]
        status = subprocess.run(command, check=False, env=OPTIONS).returncode
    if status:
        raise FindingError(f"the program ended with {status}")
    return "the figures stand above"
