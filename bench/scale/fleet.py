"""Starts replicas of the service behind the real gateway, pinned to separate processors."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.serving.load import HOST, ServerError, metric
from bench.serving.server import environment, ready, serving
from specops.config import Settings
from tests.loopback import free_port

GATEWAY = Path(__file__).resolve().parents[2] / "deploy" / "gateway" / "run.py"
_START_SECONDS, _POLL_SECONDS = 60.0, 0.05
_NO_LIMIT = "1000000"  # requests per second: all clients have one address here


@dataclass(frozen=True, slots=True)
class Fleet:
    """Running replicas with their gateway.

    Attributes:
        ports: ports of the replicas, in order.
        port: port of the gateway.
        envoy: process id of Envoy, not of the program that runs it.
        output: the gateway's log.
    """

    ports: list[int]
    port: int
    envoy: int
    output: Path

    def figures(self, name: str) -> list[float]:
        """A counter of every replica, summed over its labels."""
        return [asyncio.run(metric(port, name)) for port in self.ports]

    def log(self) -> list[dict[str, Any]]:
        """The access log, complete once the gateway has ended."""
        lines = self.output.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@dataclass(frozen=True, slots=True)
class Cores:
    """Processors of the clients, who share the first one with the gateway, and of the replicas."""

    clients: frozenset[int]
    replicas: tuple[frozenset[int], ...]

    @property
    def shared(self) -> bool:
        """Whether replicas share processors."""
        return len(set(self.replicas)) < len(self.replicas)


def cores(most: int) -> Cores:
    """Equal parts for `most` replicas if there are enough processors, else one part for all.

    A replica has the same part regardless of how many run.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    others = others or [first]
    each = len(others) // most
    parts = [others[n * each : (n + 1) * each] if each else others[-1:] for n in range(most)]
    return Cores(frozenset({first}), tuple(frozenset(part) for part in parts))


@contextmanager
def fleet(settings: Settings, size: int, pinned: Cores, folder: Path) -> Iterator[Fleet]:
    """Run replicas and the gateway during the block.

    Args:
        settings: settings of the replicas.
        size: number of replicas.
        pinned: their processors.
        folder: receives the gateway's state and log.
    """
    with ExitStack() as stack:
        ports = []
        for part in pinned.replicas[:size]:
            listed = ",".join(map(str, sorted(part)))

            def on_part(command: list[str], listed: str = listed) -> list[str]:
                return ["taskset", "--cpu-list", listed, *command]

            own = environment(replace(settings, threads=len(part)))
            ports.append(stack.enter_context(serving(own, enclosed=on_part)).port)
        yield stack.enter_context(_gateway(ports, folder, pinned.clients))


@contextmanager
def _gateway(ports: Sequence[int], folder: Path, part: frozenset[int]) -> Iterator[Fleet]:
    listen, figures = free_port(), free_port()
    command = ["taskset", "--cpu-list", ",".join(map(str, sorted(part))), sys.executable]
    command += [str(GATEWAY), "--state", str(folder), "--drain", "5"]
    command += ["--listen", f"{HOST}:{listen}", "--figures", f"{HOST}:{figures}"]
    for port in ports:
        command += ["--replica", f"{HOST}:{port}"]
    output = folder / "gateway.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "GATEWAY_CLIENT_RATE": _NO_LIMIT},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(process, listen, figures, len(ports), output)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text("utf-8")
        (envoy,) = map(int, children.split())
        yield Fleet(list(ports), listen, envoy, output)
    finally:
        process.terminate()
        process.wait()


def _wait(
    process: subprocess.Popen[bytes], listen: int, figures: int, size: int, output: Path
) -> None:
    """Wait until the gateway answers for a replica and has found all of them healthy."""
    deadline = time.monotonic() + _START_SECONDS
    name = "envoy_cluster_membership_healthy"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(
                f"the gateway ended: {output.read_text(encoding='utf-8', errors='replace')}"
            )
        with suppress(OSError, LookupError):  # it does not listen yet, or has no figures yet
            healthy = asyncio.run(metric(figures, name, "/stats/prometheus"))
            if healthy >= 2 * size + 1 and ready(listen):  # in two clusters, and the gateway's own
                return
        time.sleep(_POLL_SECONDS)  # between two checks of the condition
    raise ServerError(f"the gateway found no {size} replicas in {_START_SECONDS:g} s")
