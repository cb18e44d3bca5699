"""Runs our modules in a child process, whose memory is freed when it ends.

So the serving process never imports the libraries that convert models and read graphs. Most of a
short module's time goes into these imports: within `one_child` all modules share them.
"""

import gc
import json
import logging
import os
import signal
import socket
import subprocess  # nosec B404: runs only our own modules
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module

from specops.models.contract import WARNING
from specops.models.errors import ModelError
from specops.models.folder import MEMORY_ADVICE, SHORTER_ADVICE
from specops.system.allocator import give_back

_MAX_BYTES = 1 << 20  # of a request
_END = "\0"  # begins the line after a module's own lines; its exit status follows


class ChildError(ModelError):
    """A child process failed; the message is its standard error.

    If a signal ended the process, `killed` is true and the message says which signal and why.
    """

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class _Child:
    """A process that runs modules, one after the other.

    Without -P Python would take modules from the working directory, such as a cloned repository.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 # nosec B603: our own module
                [sys.executable, "-P", "-m", __name__],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )

    def run(self, request: list[str], lock: int | None, tell: Callable[[str], None]) -> None:
        """Run a module, the first word, with the others as its arguments; see `run_module`."""
        self._errors.seek(0)
        self._errors.truncate()
        content = json.dumps(request).encode()
        with suppress(ConnectionError):  # it has ended: its status tells why
            socket.send_fds(self._socket, [content], [] if lock is None else [lock])
        while line := self._process.stdout.readline() if self._process.stdout else "":
            if line.startswith(_END):
                status = int(line.removeprefix(_END))
                break
            tell(line.strip())
        else:
            status = self._process.wait()
        if status < 0:
            name = signal.Signals(-status).name
            why = SHORTER_ADVICE if -status == signal.SIGBUS else MEMORY_ADVICE
            raise ChildError(f"{name} ended the process, {why}", killed=True)
        if status:
            self._errors.seek(0)
            raise ChildError(self._errors.read().strip() or "it gave no reason")

    def close(self) -> None:
        """Let the process end; wait for it."""
        self._socket.close()
        with self._process:
            self._errors.close()


_kept: ContextVar[list[_Child] | None] = ContextVar("_kept", default=None)


@contextmanager
def one_child() -> Iterator[None]:
    """Run all modules of a block in one process, as long as it lives."""
    children: list[_Child] = []
    before = _kept.set(children)
    try:
        yield
    finally:
        _kept.reset(before)
        for child in children:
            child.close()


def run_module(
    module: str,
    *arguments: str,
    lock: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Run `module.main(arguments)` in a new process, or in the one of `one_child`.

    Args:
        module: a module of this package.
        arguments: its arguments.
        lock: a file handle for the child to keep open. If this process is killed, the child
            still holds the lock, and no other process clears what the child is writing.
        tell: called with each line that the child prints.

    Raises:
        ChildError: the process failed.
    """
    if (children := _kept.get()) is None:
        with one_child():
            return run_module(module, *arguments, lock=lock, tell=tell)
    if not children:
        children.append(_Child())
    try:
        return children[-1].run([module, *arguments], lock, tell)
    except ChildError:
        children.pop().close()  # it may have ended, and its memory is of no use
        raise


def main() -> None:
    """Run the modules that are asked for, until there are no more."""
    # Among the lines for the parent: standard error is for errors that end a module.
    logging.basicConfig(format=f"{WARNING}%(message)s", stream=sys.stdout)
    pipe = socket.socket(fileno=sys.stdin.fileno())
    while (received := socket.recv_fds(pipe, _MAX_BYTES, 1))[0]:
        module, *arguments = json.loads(received[0])
        status = import_module(module).main(arguments)
        for lock in received[1]:
            os.close(lock)
        gc.collect()
        give_back()
        print(f"{_END}{status}", flush=True)


if __name__ == "__main__":
    main()
