"""docs/scale.md as it is written: one command, the same URL, one figure for each replica."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.gateway.replicas import load
from tests.stack.support import ROOT, NativeStack, native_stack, run, tool
from tests.waiting import PATIENCE, answers

pytestmark = pytest.mark.e2e

CLIENTS = 6
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "scale.md").read_text(), flags=re.DOTALL)


class Started(NativeStack):
    """What the page's first command has brought up."""

    def replicas(self) -> list[str]:
        (line,) = re.findall(r"^  replicas +(.*)$", self.output.read_text(), flags=re.MULTILINE)
        return [f"http://{target}" for target in line.split(", ")]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Fast where it must be: natively, on the demo pair, one thread each."""
    make, up, *arguments = BLOCKS[0].split()
    assert (make, up) == ("make", "up")
    folder = tmp_path_factory.mktemp("scale")
    # All clients of the load are one address.
    settings = {"SPECOPS_THREADS": "1", "GATEWAY_CLIENT_RATE": "5000"}
    with native_stack(folder, *arguments, **settings) as running:
        yield Started(**vars(running))


def environment(pid: str) -> bytes:
    """The variables of a process; none where it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_the_pages_request_is_answered_at_the_url_of_one_replica(started: Started) -> None:
    (command,) = (block for block in BLOCKS if block.startswith("curl"))
    done = run("sh", "-c", command.replace("http://127.0.0.1:8000", started.api))
    assert json.loads(done.stdout)["generated_tokens"] == 16
    assert len(started.replicas()) == 3
    assert all(answers(f"{replica}/health") for replica in started.replicas())


def test_prometheus_finds_every_replica_and_the_gateway(started: Started) -> None:
    if tool("prometheus") is None:
        pytest.skip("no Prometheus here")

    def up(job: str) -> int:
        query = {"query": f'sum(up{{job="{job}"}}) or vector(0)'}
        body = httpx.get(
            f"{started.prometheus}/api/v1/query", params=query, timeout=PATIENCE
        ).json()
        return int(body["data"]["result"][0]["value"][1])

    started.wait("all are scraped", lambda: (up("specops"), up("gateway")) == (3, 1))


def test_the_weights_are_mapped_by_all_and_owned_by_none(started: Started) -> None:
    found = run("pgrep", "-f", "specops serve").stdout.split()
    ports = {httpx.URL(replica).port for replica in started.replicas()}
    shared = []
    for pid in found:
        given = environment(pid).split(b"\0")
        if not any(b"SPECOPS_PORT=%d" % port in given for port in ports):
            continue
        maps = Path(f"/proc/{pid}/smaps").read_text()
        weights = re.findall(r"/prepacked/.*?\nSize:.*?Private_Dirty: +(\d+) kB", maps, re.DOTALL)
        shared.append(sum(map(int, weights)) if weights else -1)
    assert shared == [0, 0, 0]


def restarts(started: Started) -> int:
    return started.output.read_text().count("started again")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_replica_that_is_gone_is_started_again_and_fails_no_request(
    started: Started, number: signal.Signals
) -> None:
    port = httpx.URL(started.replicas()[0]).port
    (pid,) = (
        int(pid)
        for pid in run("pgrep", "-f", "specops serve").stdout.split()
        if b"SPECOPS_PORT=%d\0" % port in environment(pid)
    )
    before = restarts(started)
    with load(started.api, CLIENTS) as seen:
        seen.wait_more(20)
        os.kill(pid, number)
        started.wait("it is said", lambda: restarts(started) > before)
        started.wait("it is ready", lambda: answers(f"{started.replicas()[0]}/health"))
        seen.wait_more(20)
    assert (seen.failed, seen.cut) == ([], 0)
    assert seen.told <= CLIENTS
