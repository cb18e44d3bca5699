"""Runs one of our modules in a process of its own, whose memory goes back when it ends.

So the serving process never imports the libraries that convert models and read graphs.
"""

from __future__ import annotations

import signal
import subprocess  # nosec B404: runs only our own modules
import sys
import tempfile
from collections.abc import Callable

from specops.models.folder import MEMORY_ADVICE, SHORTER_ADVICE


class ChildError(Exception):
    """A child process failed; the message is what it wrote to standard error.

    If a signal ended the process, `killed` is true and the message says which signal and why.
    """

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


def run_module(
    module: str,
    *arguments: str,
    lock: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Run `python -P -m module arguments…`.

    Without -P Python would take modules from the working directory, such as a cloned repository.

    Args:
        module: a module of this package.
        arguments: its arguments.
        lock: a file handle for the child to keep open. If this process is killed, the child
            still holds the lock, and no other process clears what the child is writing.
        tell: called with each line that the child prints.

    Raises:
        ChildError: the process failed.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(  # noqa: S603 # nosec B603: our own module, paths as arguments
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            pass_fds=() if lock is None else (lock,),
        ) as process,
    ):
        for line in process.stdout or ():
            tell(line.strip())
        if status := process.wait():
            if status < 0:
                name = signal.Signals(-status).name
                why = SHORTER_ADVICE if -status == signal.SIGBUS else MEMORY_ADVICE
                raise ChildError(f"{name} ended the process, {why}", killed=True)
            errors.seek(0)
            raise ChildError(errors.read().strip() or "it gave no reason")
