"""Compiles the kernels of `specops.runtime.kernels`; all else of the project is in pyproject.toml.

zig's C compiler comes as a package, so that nothing needs to be on the machine; `CC` names another.
Each kind of processor has its kernels, compiled with its own flags; which of them compute is
decided when they are loaded. Flags never allow to fuse a multiplication with an addition or to
reorder sums: all kernels compute the same bits.
"""

import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

KERNELS = Path("api/specops/runtime/kernels")
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=default")
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi")
AVX2 = ("-mavx2", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
COMMON = ("operators", "processor", "matmul_operator", "attention_operator")
COMMON += ("matmul", "attention", "sampling", "suffixes")


def objects() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Each object's source and flags of its own."""
    table: dict[str, tuple[str, tuple[str, ...]]] = {name: (name, ()) for name in COMMON}
    variants = {"plain": ()}
    if platform.machine() in ("x86_64", "AMD64"):
        variants |= {"avx2": AVX2, "avx512": AVX512}
    for variant, flags in variants.items():
        table[f"matmul_{variant}"] = (f"matmul_{variant}", flags)
        for kernel in ("attention", "sampling"):
            name = f"-D{kernel.upper()}={kernel.upper()}_{variant.upper()}"
            table[f"{kernel}_{variant}"] = (f"{kernel}_kernel", (*flags, name))
    return table


def compiler() -> list[str]:
    """The command of `CC`, else zig's compiler, else the system's."""
    command = ["cc"]
    if given := os.environ.get("CC"):
        command = shlex.split(given)
    elif importlib.util.find_spec("ziglang"):
        command = [sys.executable, "-m", "ziglang", "cc"]
    # zig compiles for the very processor that it runs on, unless told not to.
    return [*command, "-mcpu=baseline"] if any("zig" in word for word in command) else command


class Compile(build_ext):
    """Builds the library without the flags that Python was built with."""

    def build_extension(self, ext: Extension) -> None:
        """Write the library to where setuptools looks for it."""
        library = Path(self.get_ext_fullpath(ext.name))
        folder = Path(self.build_temp) / "kernels"
        for parent in (library.parent, folder):
            parent.mkdir(parents=True, exist_ok=True)
        built = []
        for name, (source, flags) in objects().items():
            built.append(str(folder / f"{name}.o"))
            call(*FLAGS, *WARNINGS, *flags, "-c", str(KERNELS / f"{source}.c"), "-o", built[-1])
        call("-shared", "-s", *built, "-lm", "-o", str(library))


def call(*arguments: str) -> None:
    """Call the compiler.

    Raises:
        CompileError: it is missing or failed.
    """
    command = [*compiler(), *arguments]
    print(shlex.join(command), flush=True)
    try:
        subprocess.run(command, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(
            f"the kernels cannot be built: {error}. The package ziglang brings a compiler "
            "(pip install ziglang); CC=gcc or CC=clang names one of this machine."
        ) from error


if __name__ == "__main__":
    setup(
        cmdclass={"build_ext": Compile},
        ext_modules=[
            Extension(
                "specops.runtime.kernels._native",
                [str(path) for path in sorted(KERNELS.glob("*.c"))],
                depends=[str(path) for path in sorted(KERNELS.glob("*.h"))],
            )
        ],
    )
