"""Compiles the kernels of `specops.kernels`; all else about the project is in pyproject.toml.

zig's C compiler comes as a package, so that nothing needs to be on the machine. Where neither it
nor another compiler is to be had the project is installed without: ONNX Runtime computes then.
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

KERNELS = Path("api/specops/kernels")
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-s", "-Wall", "-Wextra")


class Compile(build_ext):
    """Builds a library by one call of a compiler, without the flags that Python was built with."""

    def build_extension(self, ext: Extension) -> None:
        """Write the library to where setuptools looks for it."""
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        command = [*compiler(), *FLAGS, *ext.sources, "-o", str(library)]
        print(shlex.join(command), flush=True)
        try:
            subprocess.run(command, check=True)  # noqa: S603
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(str(error)) from error  # what `optional` allows


def compiler() -> list[str]:
    """The command of `CC`, else zig's compiler, else the system's."""
    if given := os.environ.get("CC"):
        return shlex.split(given)
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return ["cc"]


setup(
    cmdclass={"build_ext": Compile},
    ext_modules=[
        Extension(
            "specops.kernels._native",
            [str(path) for path in sorted(KERNELS.glob("*.c"))],
            depends=[str(path) for path in sorted(KERNELS.glob("*.h"))],
            optional=True,
        )
    ]
    if platform.machine() in ("x86_64", "AMD64")
    else [],
)
