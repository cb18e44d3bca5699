"""The HTTP API as its users see it: `specops serve` in a process of its own, and a client."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from specops.config import PREFIX, Settings

_HOST = "127.0.0.1"
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.05
_REQUEST_SECONDS = 600.0
_EVENT, _DONE = b"data: ", b"[DONE]"


class ServerError(RuntimeError):
    """The server did not start, or refused a request; the message has its words."""


class RefusedError(ServerError):
    """A request was answered with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


def environment(settings: Settings) -> dict[str, str]:
    """The `SPECOPS_*` variables from which a process reads exactly these settings."""
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}
    return {
        PREFIX + name.upper(): str(int(value)) if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if str(value)
    }


class Client:
    """One connection, kept open between requests as long as the server keeps it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connection = http.client.HTTPConnection(_HOST, port, timeout=_REQUEST_SECONDS)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def ready(self) -> bool:
        """Whether the server is ready, by `GET /health`."""
        self._connection.request("GET", "/health")
        response = self._connection.getresponse()
        health = json.loads(response.read())
        if health["error"]:
            raise ServerError(f"the model cannot be served: {health['error']}")
        return response.status == http.HTTPStatus.OK

    def connect(self) -> None:
        """Open the connection before it is needed."""
        self._connection.connect()

    def get(self, path: str) -> str:
        """`GET` a path; returns the text of the answer."""
        self._connection.request("GET", path)
        return self._connection.getresponse().read().decode()

    def metric(self, name: str, path: str = "/metrics") -> float:
        """The sum of a metric over all its labels."""
        rows = self.get(path).splitlines()
        kept = [row for row in rows if row.startswith((f"{name} ", f"{name}{{"))]
        if not kept:
            raise ServerError(f"the server has no metric {name}")
        return sum(float(row.rpartition(" ")[2]) for row in kept)

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`POST /generate`; returns the answer."""
        answer: dict[str, Any] = json.loads(self.post("/generate", body).read())
        return answer

    def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """`POST` JSON; returns the answer, whose body is still to be read.

        Raises:
            RefusedError: the status is not 200.
        """
        headers = {"Content-Type": "application/json", **(headers or {})}
        self._connection.request("POST", path, json.dumps(body).encode(), headers)
        response = self._connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RefusedError(response.status, response.read().decode())
        return response


def events(response: http.client.HTTPResponse) -> list[dict[str, Any]]:
    """All events of a streamed answer."""
    lines = [line.removeprefix(_EVENT).strip() for line in response if line.startswith(_EVENT)]
    if len(lines) < 2 or lines[-1] != _DONE:
        raise ServerError(f"the stream ended early: {lines[-1:]}")
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def serving(
    settings: Settings, enclosed: Callable[[list[str]], list[str]] = list
) -> Iterator[tuple[int, Client]]:
    """Run the API on a free loopback port; yields its process id and a client.

    `enclosed` wraps the command line in another one, which must become the first in the end.
    """
    settings = replace(settings, host=_HOST, port=free_port(), log_level="warning")
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            enclosed([sys.executable, "-m", "specops", "serve"]),
            env={**inherited, **environment(settings)},
            cwd=Path(__file__).resolve().parents[2],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        client = Client(settings.port)
        try:
            try:
                _wait_until_ready(process, client)
            except ServerError as error:
                log.seek(0)
                raise ServerError(f"{error}: {log.read().decode(errors='replace')}") from None
            yield process.pid, client
        finally:
            client.close()
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], client: Client) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server ended with code {process.returncode}")
        try:
            if client.ready():
                return
        except OSError:
            client.close()  # it does not listen yet: the next request connects anew
        time.sleep(_POLL_SECONDS)  # between two looks at the condition
    raise ServerError(f"the server was not ready after {_START_SECONDS:g} s")


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
