"""Starts the service as its users do: `specops serve` in a separate process."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import httpx

from bench.serving.load import HOST, ServerError
from specops.config import PREFIX, Settings
from tests.loopback import free_port

_START_SECONDS = 600.0  # below a cap, on a busy machine
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05


def environment(settings: Settings) -> dict[str, str]:
    """The `SPECOPS_*` variables for exactly these settings."""
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}
    return {
        PREFIX + name.upper(): str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if str(value)
    }


def changed(settings: Settings) -> dict[str, str]:
    """Only the variables that differ from the defaults, so that older versions know them."""
    usual = environment(Settings())
    return {name: text for name, text in environment(settings).items() if usual.get(name) != text}


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid


@contextmanager
def serving(
    variables: Mapping[str, str],
    *,
    port: int | None = None,
    log: Path | None = None,
    program: Sequence[str] = (sys.executable, "-m", "specops"),
    enclosed: Callable[[list[str]], list[str]] = list,
) -> Iterator[Server]:
    """Run the API on a loopback port during the block.

    Args:
        variables: the settings as `SPECOPS_*`; those of this process are ignored.
        port: the port; None: a free one.
        log: file for its log; None: it logs only warnings, for error messages.
        program: starts the command line.
        enclosed: wraps the command line; the process must finally become the server.

    Raises:
        ServerError: it did not start; the message has its log.
    """
    port = port or free_port()
    quiet = {} if log else {f"{PREFIX}LOG_LEVEL": "warning"}
    own = {**variables, **quiet, f"{PREFIX}HOST": HOST, f"{PREFIX}PORT": str(port)}
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    command = enclosed([*program, "serve"])
    with running(command, port, {**inherited, **own}, log) as server:
        yield server


@contextmanager
def running(
    command: list[str],
    port: int,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[Server]:
    """Run a server that answers `/health` during the block.

    Args:
        command: the command line.
        port: the port on which it listens.
        environment: all its environment variables; None: those of this process.
        log: file for its output; None: a temporary file.

    Raises:
        ServerError: it did not start; the message has its log.
    """
    with log.open("w+b") if log else tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=Path(__file__).resolve().parents[2],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            try:
                _wait_until_ready(process, port)
            except ServerError as error:
                output.seek(0)
                raise ServerError(f"{error}: {output.read().decode(errors='replace')}") from None
            yield Server(port, process)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with code {process.returncode}")
        if ready(port):
            return
        time.sleep(_POLL_SECONDS)  # between two checks of the condition
    raise ServerError(f"the server was not ready after {_START_SECONDS:g} s")


def ready(port: int) -> bool:
    """Whether `GET /health` says that the server is ready; False if nothing listens.

    This also works in a running event loop.

    Raises:
        ServerError: the server says that it cannot serve its model.
    """
    try:
        answer = httpx.get(f"http://{HOST}:{port}/health", timeout=_STOP_SECONDS)
    except httpx.TransportError:
        return False
    if answer.headers.get("content-type") == "application/json" and answer.json().get("error"):
        raise ServerError(f"the model cannot be served: {answer.json()['error']}")
    return answer.status_code == 200
