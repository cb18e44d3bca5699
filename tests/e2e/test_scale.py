"""compose.scale.yaml over compose.yaml on a Docker Engine: three replicas, one killed, one hung."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from tests.e2e import clients, stand_ins
from tests.e2e.engine import COMMAND_SECONDS
from tests.e2e.stack import PORTS, Stack
from tests.gateway.replicas import load
from tests.loopback import HOST, free_port
from tests.stack.support import ROOT, Finished, run
from tests.waiting import wait

pytestmark = pytest.mark.e2e

REPLICAS, CLIENTS = 3, 4
FILES = ("compose.yaml", "compose.scale.yaml")
# Runs in a container: what is at an address, or the status of its refusal.
FETCH = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())
except urllib.error.HTTPError as error:
    print("status", error.code)
"""
# Runs in a container: stops the server, as if it hung.
STOP = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    if b"specops\\0serve" in (folder / "cmdline").read_bytes():
        os.kill(int(folder.name), signal.SIGSTOP)
"""


@dataclass(frozen=True)
class Scaled(Stack):
    """The replicas and their gateway, as a project beside the other one."""

    def compose(self, *arguments: object, check: bool = True) -> Finished:
        """Run Compose on both files and the override."""
        files = [part for name in FILES for part in ("--file", ROOT / name)]
        command = (*self.engine.compose, "--project-name", f"{stand_ins.PREFIX}-scale")
        command = (*command, "--project-directory", ROOT, *files, "--file", self.override)
        finished = run(
            *command, "--profile", "scale", *arguments, env=self.env, timeout=COMMAND_SECONDS
        )
        if check and finished.returncode:
            logs = self.compose("logs", "--no-color", "--tail", "40", check=False)
            pytest.fail(f"{arguments}: {finished.stdout}{finished.stderr}\n{logs.stdout}")
        return finished

    def fetch(self, service: str, url: str) -> str:
        """What a container of the service finds there."""
        container = self.container(service).split()[0]
        return self.engine.docker("exec", container, "python", "-c", FETCH, url).stdout.strip()

    def healthy_replicas(self) -> int:
        """How many replicas the gateway asks."""
        page = self.fetch("gateway", f"http://{HOST}:9901/stats/prometheus")
        name = 'envoy_cluster_membership_healthy{envoy_cluster_name="replicas"}'
        (row,) = (row for row in page.splitlines() if row.startswith(name))
        return int(float(row.rpartition(" ")[2]))


@pytest.fixture(scope="module")
def scaled(started: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    """Three replicas from the image that the other project has built."""
    override = Path(tmp_path_factory.mktemp("scale")) / "override.yaml"
    images = {name: {"image": f"{stand_ins.PREFIX}/{name}"} for name in ("api", "gateway")}
    override.write_text(yaml.safe_dump({"services": images}))
    env = {**started.env, PORTS["api"]: str(free_port()), "REPLICAS": str(REPLICAS)}
    env |= {"SPECOPS_THREADS": "1", "GATEWAY_CLIENT_RATE": "5000"}  # all clients are one here
    running = replace(Scaled(**vars(started)), override=override, env=env)
    try:
        running.compose("build", "gateway")
        running.compose("up", "--no-build", "--detach", "--wait", "gateway")
        wait("all are in", lambda: running.healthy_replicas() == REPLICAS, 180)
        yield running
    finally:
        running.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)


def test_the_gateway_has_the_published_port_and_the_replicas_have_none(scaled: Scaled) -> None:
    assert clients.generate(scaled.url("api"), max_new_tokens=4)["generated_tokens"] == 4
    replicas = scaled.container("api").split()
    assert len(replicas) == REPLICAS
    for container in replicas:
        assert scaled.engine.docker("port", container).stdout == ""
    assert (
        scaled.engine.docker("port", scaled.container("gateway"))
        .stdout.split()[-1]
        .endswith(scaled.env[PORTS["api"]])
    )


def test_a_killed_replica_fails_no_request_and_comes_back(scaled: Scaled) -> None:
    victim = scaled.container("api").split()[0]
    with load(scaled.url("api"), CLIENTS) as seen:
        seen.wait_more(20)
        scaled.engine.docker("kill", victim)
        wait("it is out of rotation", lambda: scaled.healthy_replicas() == REPLICAS - 1)
        seen.wait_more(20)
        scaled.engine.docker("start", victim)
        wait("it is back in rotation", lambda: scaled.healthy_replicas() == REPLICAS, 180)
        seen.wait_more(20)
    assert (seen.failed, seen.cut) == ([], 0)
    assert seen.told <= CLIENTS


def test_a_hung_replica_is_restarted_and_fails_no_request(scaled: Scaled) -> None:
    victim = scaled.container("api").split()[1]

    def restarts() -> int:
        count = scaled.engine.docker("inspect", "--format", "{{.RestartCount}}", victim)
        return int(count.stdout)

    before = restarts()
    with load(scaled.url("api"), CLIENTS) as seen:
        seen.wait_more(20)
        scaled.engine.docker("exec", victim, "python", "-c", STOP)
        wait("it is out of rotation", lambda: scaled.healthy_replicas() == REPLICAS - 1)
        wait("it is restarted", lambda: restarts() == before + 1, 180)
        wait("it is back in rotation", lambda: scaled.healthy_replicas() == REPLICAS, 180)
        seen.wait_more(20)
    assert (seen.failed, seen.cut) == ([], 0)
    assert seen.told <= CLIENTS


def test_nothing_of_the_admin_interface_is_reached_from_a_neighbour(scaled: Scaled) -> None:
    assert "envoy_cluster" in scaled.fetch("api", "http://gateway:9901/stats/prometheus")
    for path in ("config_dump", "quitquitquit", "stats"):
        assert scaled.fetch("api", f"http://gateway:9901/{path}") == "status 404"


def test_its_process_has_no_privileges(scaled: Scaled) -> None:
    status = scaled.read("gateway", "/proc/1/status")
    assert status is not None
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    mounts = scaled.read("gateway", "/proc/mounts")
    assert mounts is not None
    (options,) = (line.split()[3] for line in mounts.splitlines() if line.split()[1] == "/")
    assert "ro" in options.split(",")


def test_it_ends_when_it_is_asked_to(scaled: Scaled) -> None:
    scaled.compose("stop", "gateway")
    assert scaled.inspect("gateway", "{{.State.ExitCode}}") == "0"
