"""compose.scale.yaml over compose.yaml on a Docker Engine: three replicas, one killed, one hung."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import yaml

from tests.deploy.gateway.load import load
from tests.deploy.gateway.running import figure
from tests.e2e import clients, stand_ins
from tests.e2e.stack import PORTS, Stack
from tests.loopback import HOST, free_port
from tests.waiting import wait

pytestmark = pytest.mark.e2e

REPLICAS, CLIENTS = 3, 4
# Runs in a container: prints the content of a URL, or the status of its refusal.
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


def fetch(scaled: Stack, service: str, url: str) -> str:
    """What a container of the service finds there."""
    return scaled.execute(service, "python", "-c", FETCH, url).stdout.strip()


def healthy_replicas(scaled: Stack) -> int:
    page = fetch(scaled, "gateway", f"http://{HOST}:9901/stats/prometheus")
    return int(figure(page, "envoy_cluster_membership_healthy", 'cluster_name="replicas"'))


@pytest.fixture(scope="module")
def scaled(started: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three replicas from the image that the other project has built."""
    override = tmp_path_factory.mktemp("scale") / "override.yaml"
    images = {name: {"image": f"{stand_ins.PREFIX}/{name}"} for name in ("api", "gateway")}
    override.write_text(yaml.safe_dump({"services": images}))
    env = {**started.env, PORTS["api"]: str(free_port()), "REPLICAS": str(REPLICAS)}
    env |= {"SPECOPS_THREADS": "1", "GATEWAY_CLIENT_RATE": "5000"}  # all clients have one address
    running = replace(
        started,
        override=override,
        env=env,
        project=f"{stand_ins.PREFIX}-scale",
        files=("compose.yaml", "deploy/compose.scale.yaml"),
        profile="scale",
    )
    try:
        running.compose("build", "gateway")
        running.compose("up", "--no-build", "--detach", "--wait", "gateway")
        wait("all are in", lambda: healthy_replicas(running) == REPLICAS, 180)
        yield running
    finally:
        running.remove()


def test_only_the_gateway_has_a_port_and_no_privileges_and_no_open_admin(scaled: Stack) -> None:
    assert clients.generate(scaled.url("api"), max_new_tokens=4)["generated_tokens"] == 4
    replicas, (gateway,) = scaled.containers("api"), scaled.containers("gateway")
    assert len(replicas) == REPLICAS
    ports = {one: scaled.engine.docker("port", one).stdout for one in (*replicas, gateway)}
    assert ports.pop(gateway).strip().endswith(scaled.env[PORTS["api"]])
    assert set(ports.values()) == {""}
    status = scaled.read("gateway", "/proc/1/status") or ""
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    mounts = scaled.read("gateway", "/proc/mounts") or ""
    (options,) = (line.split()[3] for line in mounts.splitlines() if line.split()[1] == "/")
    assert "ro" in options.split(",")
    assert "envoy_cluster" in fetch(scaled, "api", "http://gateway:9901/stats/prometheus")
    for path in ("config_dump", "quitquitquit", "stats"):
        assert fetch(scaled, "api", f"http://gateway:9901/{path}") == "status 404"


@pytest.mark.parametrize("fault", ["killed", "hung"])
def test_a_replica_that_is_gone_fails_no_request_and_comes_back(scaled: Stack, fault: str) -> None:
    docker, victim = scaled.engine.docker, scaled.containers("api")[fault == "hung"]

    def restarts() -> int:
        return int(docker("inspect", "--format", "{{.RestartCount}}", victim).stdout)

    before = restarts()
    with load(scaled.url("api"), CLIENTS) as seen:
        seen.wait_more(20)
        if fault == "hung":
            docker("exec", victim, "python", "-c", STOP)
        else:
            docker("kill", victim)
        wait("it is out of rotation", lambda: healthy_replicas(scaled) == REPLICAS - 1)
        if fault == "hung":
            wait("it is restarted", lambda: restarts() == before + 1, 180)
        else:
            seen.wait_more(20)
            docker("start", victim)
        wait("it is back in rotation", lambda: healthy_replicas(scaled) == REPLICAS, 180)
        seen.wait_more(20)
    seen.require_no_failure(begun=CLIENTS)


def test_the_gateway_ends_when_it_is_asked_to(scaled: Stack) -> None:
    scaled.compose("stop", "gateway")
    assert scaled.inspect("gateway", "{{.State.ExitCode}}") == "0"
