"""Compiles the kernels of `specops.runtime.kernels`; pyproject.toml has the rest of the project.

zig's C compiler comes as a package, so the machine needs no compiler; `CC` names another one. Each
kind of processor has its own kernels, compiled with its own flags; the library chooses among them
when it is loaded. The flags never allow the compiler to fuse a multiplication with an addition or
to reorder sums: all kernels compute the same bits.

`KERNELS_TARGET` names another machine to compile for, one of `TARGETS`; scripts/wheels sets it. The
library does not use Python, so a wheel fits every Python version.
"""

import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

KERNELS = Path("api/specops/runtime/kernels")
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=default")
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi")
AVX2 = ("-mavx2", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
COMMON = ("operators", "processor", "matmul_operator", "norm_operator", "attention_operator")
COMMON += ("gather_operator", "short_conv_operator", "states_operator", "matmul", "attention")
COMMON += ("sampling", "suffixes", "lengths", "quantize", "tiles", "lost_pages")
# For each variant of the kernel of products its source and its flags. Of the other kernels only
# attention gains from instructions for bytes.
MATMUL = {
    "x86_64": {
        "avx2": ("pairs", AVX2),
        "avx512": ("pairs", AVX512),
        "vnni256": ("dots", (*AVX2, "-mavxvnni")),
        "vnni512": ("dots", (*AVX512, "-mavx512vnni")),
    },
    "aarch64": {
        "dotprod": ("dots", ("-march=armv8.2-a+dotprod",)),
        "i8mm": ("dots", ("-march=armv8.2-a+dotprod+i8mm",)),
    },
}
VECTORS = {"x86_64": {"avx2": AVX2, "avx512": AVX512}}
BYTES = {"x86_64": ("vnni256", "vnni512"), "aarch64": ("dotprod",)}  # variants of attention, too
# For each target of wheels: the machine, zig's target with the oldest system, and the wheel's tag.
TARGETS = {
    "linux-x86_64": ("x86_64", "x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    "linux-arm64": ("aarch64", "aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    "macos-arm64": ("aarch64", "aarch64-macos.11.0", "macosx_11_0_arm64"),
}
Objects = dict[str, tuple[str, tuple[str, ...]]]


def target() -> str | None:
    """The target to compile for; None: this machine.

    Raises:
        CompileError: there is no such target.
    """
    name = os.environ.get("KERNELS_TARGET") or None
    if name is not None and name not in TARGETS:
        raise CompileError(f"KERNELS_TARGET is {name}: it is none of {', '.join(TARGETS)}")
    return name


def machine() -> str:
    """The kind of processor to compile for."""
    if name := target():
        return TARGETS[name][0]
    here = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(here, here)


def objects(kind: str) -> Objects:
    """For each object file its source and its own flags."""
    table: Objects = {name: (name, ()) for name in COMMON}
    plain: Objects = {"plain": ("dots", ())}
    for variant, (source, flags) in (plain | MATMUL.get(kind, {})).items():
        name = f"matmul_{variant}"
        table[name] = (f"matmul_{source}", (*flags, f"-DMATMUL={name.upper()}"))
    vectors = {"plain": ()} | VECTORS.get(kind, {})
    of_bytes = {variant: MATMUL[kind][variant][1] for variant in BYTES.get(kind, ())}
    for kernel in ("attention", "sampling", "quantize", "short_conv", "states"):
        for variant, flags in (vectors | (of_bytes if kernel == "attention" else {})).items():
            name = f"{kernel}_{variant}"
            table[name] = (f"{kernel}_kernel", (*flags, f"-D{kernel.upper()}={name.upper()}"))
    return table


def compiler() -> list[str]:
    """The command in `CC`, else zig's compiler, else the system's."""
    command = ["cc"]
    if given := os.environ.get("CC"):
        command = shlex.split(given)
    elif importlib.util.find_spec("ziglang"):
        command = [sys.executable, "-m", "ziglang", "cc"]
    if name := target():
        command += ["-target", TARGETS[name][1]]
    return command


def command_of(*arguments: str, compiler: list[str]) -> list[str]:
    """The command line; zig has other names for the processor's flags."""
    if any("zig" in word for word in compiler):
        # Without a flag zig compiles for the very processor on which it runs.
        words = [word.replace("-march=armv8.2-a", "-mcpu=generic") for word in arguments]
        known = any(word.startswith("-mcpu") for word in words)
        return [*compiler, *(() if known else ("-mcpu=baseline",)), *words]
    return [*compiler, *arguments]


class Compile(build_ext):
    """Builds the library without the flags that Python was built with."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's name, without Python's version."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Write the library where setuptools looks for it."""
        library = Path(self.get_ext_fullpath(ext.name))
        folder = Path(self.build_temp) / "kernels" / (target() or "here")
        for parent in (library.parent, folder):
            parent.mkdir(parents=True, exist_ok=True)
        commands = {
            folder / f"{name}.o": (*FLAGS, *WARNINGS, *flags, "-c", str(KERNELS / f"{source}.c"))
            for name, (source, flags) in objects(machine()).items()
        }
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # a compiler uses one processor
            list(pool.map(lambda path: call(*commands[path], "-o", str(path)), commands))
        built = list(map(str, commands))
        apple = "macos" in (target() or "") or (target() is None and sys.platform == "darwin")
        named = ("-install_name", f"@rpath/{library.name}") if apple else ()
        call("-shared", "-s", *named, *built, "-lm", "-o", str(library))


class Wheel(bdist_wheel):
    """Names the wheel for any Python 3 on the target."""

    def get_tag(self) -> tuple[str, str, str]:
        """The wheel's tag."""
        name = target()
        return "py3", "none", TARGETS[name][2] if name else super().get_tag()[2]


def call(*arguments: str) -> None:
    """Call the compiler.

    Raises:
        CompileError: it is missing or failed.
    """
    command = command_of(*arguments, compiler=compiler())
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
        cmdclass={"build_ext": Compile, "bdist_wheel": Wheel},
        ext_modules=[
            Extension(
                "specops.runtime.kernels._native",
                [str(path) for path in sorted(KERNELS.glob("*.c"))],
                depends=[str(path) for path in sorted(KERNELS.glob("*.h"))],
            )
        ],
    )
