"""Builds llama-server for this processor, once, from the source archive of the pinned llama.cpp.

This takes about five minutes on two cores, and needs CMake and a C++ compiler.
"""

import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from bench.peers.environment import InstallError
from bench.serving.load import HOST
from bench.serving.server import Server, running
from bench.tools.report import progress
from tests.files.packages import LLAMA_CPP, llama_cpp
from tests.loopback import free_port

_BUILD = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)
# The options that llama.vim's documentation recommends, without those for GPUs.
_SPEED = ("--batch-size", "1024", "--ubatch-size", "512", "--cache-reuse", "256")


def llama_server(cache: Path) -> Path:
    """The server's executable, built by the first call.

    Raises:
        InstallError: the build fails.
    """
    home = cache / "environment" / LLAMA_CPP.replace("==", "-")
    executable = home / "bin" / "llama-server"
    if not executable.is_file():
        progress(f"building llama-server in {home}, which takes minutes")
        configure = ["cmake", "-S", str(llama_cpp()), "-B", str(home), *_BUILD]
        for command in (configure, ["cmake", "--build", str(home), "-j2", "-t", "llama-server"]):
            try:
                subprocess.run(command, capture_output=True, text=True, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                log = getattr(error, "stderr", "")[-500:]
                raise InstallError(f"llama-server cannot be built: {error} {log}") from None
    return executable


def llama_serving(
    executable: Path, model: Path, *, threads: int, context: int
) -> AbstractContextManager[Server]:
    """Run llama-server on a loopback port until the block ends.

    Args:
        executable: the server.
        model: a GGUF.
        threads: number of threads.
        context: tokens of the context.
    """
    port = free_port()
    sizes = ("--threads", threads, "--ctx-size", context, "--host", HOST, "--port", port)
    command = (executable, "--model", model, *_SPEED, *sizes)
    return running(list(map(str, command)), port)
