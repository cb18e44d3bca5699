"""compose.yaml, unchanged, on a Docker Engine: hardened, capped, watched, killed and drained."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from specops.runtime import kernels
from tests.e2e import clients
from tests.e2e.clients import PROMPT, Stream
from tests.e2e.stack import COMPOSE, UP, Stack
from tests.stack import queries
from tests.waiting import PATIENCE, wait

pytestmark = pytest.mark.e2e

SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BYTES = {"m": 1 << 20, "g": 1 << 30}
SLOTS = 8  # requests that run at the same time by default
CLOSE, STEP = 64 << 20, 2 << 20  # bytes below the cap
MOST_IMAGE_BYTES = 450 * 10**6  # of the API's image, without weights
Tell = Callable[[str], None]
every_service = pytest.mark.parametrize("service", SERVICES)

# Runs in the API's container: waits for a line, then kills the service as the kernel would, which
# picks the process that holds the memory. (`docker kill` is an order to the engine, which then
# does not start the container again.)
KILLER = """
import os, pathlib, signal
(victim,) = [
    int(path.parent.name) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
    if path.read_bytes().split(b"\\0")[1:3] == [b"/opt/specops/venv/bin/specops", b"serve"]
]
print("ready", flush=True)
input()
os.kill(victim, signal.SIGKILL)
"""


# Runs in the API's container: takes as many bytes as a line says, and holds them.
HOG = """
import sys
held = []
for line in sys.stdin:
    held.append(b"x" * int(line))
    print("held", flush=True)
"""


def size(text: str) -> int:
    """Bytes of a size as Compose writes it: `512m`, `4g`."""
    return int(text[:-1]) * BYTES[text[-1]]


@pytest.fixture
def container(stack: Stack, service: str) -> str:
    """The container of a service, running."""
    if service not in stack.services:
        pytest.skip(f"{service.upper()} WAS NOT TESTED: its image cannot be pulled here")
    stack.compose(*UP, service)
    return stack.container(service)


@pytest.fixture(scope="module")
def load(started: Stack, tell: Tell) -> dict[str, Any]:
    """What Locust's page says after a load that was started there."""
    started.compose(*UP, "locust")
    page = started.url("locust")
    httpx.post(f"{page}/swarm", data={"time_scale": "0.5"}, timeout=PATIENCE).raise_for_status()

    def figures() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{page}/stats/requests", timeout=PATIENCE).json()
        return found

    wait("the load ends", lambda: figures()["state"] == "stopped", 180)
    total = figures()
    for row in total["stats"]:
        if row["method"] == "POST":
            counts = f"{row['num_requests']} times, {row['num_failures']} failed"
            tell(f"load from its container: {row['name']} {counts}")
    return total


@every_service
def test_a_container_is_healthy_at_its_first_start(
    stack: Stack, service: str, container: str
) -> None:
    assert stack.healthy(service)
    assert stack.inspect(service, "{{.RestartCount}}") == "0"


def test_generate_answers_through_the_published_port(stack: Stack) -> None:
    answer = clients.generate(stack.url("api"), max_new_tokens=16)
    assert answer["generated_tokens"] == 16
    assert {"generated_text", "tokens_per_second", "avg_tokens_per_jump", "latency_ms"} <= set(
        answer
    )


@every_service
def test_its_process_has_no_privileges(stack: Stack, service: str, container: str) -> None:
    status = stack.read(service, "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    user, group = map(int, SERVICES[service]["user"].split(":"))
    assert fields["Uid"].split() == [str(user)] * 4
    assert fields["Gid"].split() == [str(group)] * 4
    assert user != 0
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[kind], 16) == 0, kind
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


@every_service
def test_its_root_file_system_is_read_only(stack: Stack, service: str, container: str) -> None:
    mounts = stack.read(service, "/proc/mounts")
    (options,) = (line.split()[3] for line in mounts.splitlines() if line.split()[1] == "/")
    assert "ro" in options.split(",")
    as_root = ("exec", "--user", "0", container, "touch", "/probe")
    refused = stack.engine.docker(*as_root, check=False)
    assert "Read-only file system" in refused.stderr


@every_service
def test_the_kernel_enforces_its_memory_limit(
    stack: Stack, service: str, container: str, tell: Tell
) -> None:
    limit = size(SERVICES[service]["mem_limit"])
    found = stack.read(service, "/sys/fs/cgroup/memory.max") or stack.read(
        service, "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    assert found is not None
    assert int(found) == limit
    tell(f"memory limit of {service}, in its cgroup: {int(found):,} bytes")


def test_the_kernel_enforces_the_swap_limit(stack: Stack, tell: Tell) -> None:
    if stack.engine.info("{{.SwapLimit}}") != "true":
        pytest.skip("this kernel does not account for swap: memswap_limit has no effect")
    api = SERVICES["api"]
    memory, both = size(api["mem_limit"]), size(api["memswap_limit"])
    swap = stack.read("api", "/sys/fs/cgroup/memory.swap.max")
    if swap is None:  # version 1 counts memory and swap together
        found = stack.read("api", "/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes")
        assert found is not None
        swap = str(int(found) - memory)
    assert int(swap) == both - memory
    tell(f"swap limit of api, in its cgroup: {int(swap):,} bytes")


def test_the_service_knows_its_limit(stack: Stack) -> None:
    page = httpx.get(f"{stack.url('api')}/metrics", timeout=PATIENCE).text
    (limit,) = (
        float(line.split()[1])
        for line in page.splitlines()
        if line.startswith('specops_memory_bytes{kind="limit"}')
    )
    assert limit == size(SERVICES["api"]["mem_limit"])


def test_the_image_has_the_kernels_of_this_processor(stack: Stack, tell: Tell) -> None:
    page = httpx.get(f"{stack.url('api')}/metrics", timeout=PATIENCE).text
    (info,) = (line for line in page.splitlines() if line.startswith("specops_model_info{"))
    (found,) = re.findall(r'kernels="([^"]+)"', info)
    assert found == kernels.kernel()
    tell(f"products with weights are computed by {found}")


def test_the_memory_plan_is_made_for_the_containers_limit(stack: Stack, tell: Tell) -> None:
    lines = [
        line["message"].removeprefix("memory: ")
        for line in stack.logged("api")
        if line["message"].startswith("memory: ")
    ]
    limit = next(line for line in lines if line.startswith("limit"))
    assert f"{size(SERVICES['api']['mem_limit']) / 1e6:,.1f} MB" in limit
    assert "cgroup v" in limit
    for line in lines[: lines.index(limit) + 7]:
        tell(f"plan: {line}")


def test_the_image_has_what_it_runs_with_and_nothing_to_build_with(
    stack: Stack, tell: Tell
) -> None:
    container = stack.container("api")
    program = "command -v gcc cc g++ make; ls /opt/specops/venv/bin/pip; "
    program += "du -skc /opt/specops/models /opt/specops/venv/share | tail -1"
    found = stack.engine.docker("exec", container, "sh", "-c", program)
    weights_kib, path = found.stdout.split()  # and no other line: none of the programs is there
    assert path == "total"
    template = (
        "{{.Size}} {{.Config.User}} {{json .Config.Healthcheck.Test}} {{json .Config.Labels}}"
    )
    image = stack.inspect("api", "{{.Image}}")
    told = stack.engine.docker("image", "inspect", "--format", template, image).stdout
    bytes_in_all, user, rest = told.split(maxsplit=2)
    assert user == SERVICES["api"]["user"]
    assert '["CMD",' in rest
    assert '"org.opencontainers.image.licenses":"Apache-2.0"' in rest
    without_weights = int(bytes_in_all) - int(weights_kib) * 1024
    assert without_weights < MOST_IMAGE_BYTES
    tell(f"image of api: {without_weights / 1e6:,.0f} MB without the models")


def test_locust_loads_the_api_from_its_container(stack: Stack, load: dict[str, Any]) -> None:
    rows = {(row["method"], row["name"]): row for row in load["stats"]}
    for name in ("/generate", "/generate (stream)"):
        assert rows["POST", name]["num_requests"] > 0
        assert rows["POST", name]["num_failures"] == 0
    assert load["errors"] == []


def test_prometheus_scrapes_and_every_panel_has_data(stack: Stack, load: dict[str, Any]) -> None:
    wait("the target is up", lambda: stack.query('up{job="specops"}') == [1.0])
    asked = dict(queries.dashboard_queries())
    wait("every panel has data", lambda: all(map(stack.query, asked.values())))
    address = f"{stack.url('prometheus')}/api/v1/rules"
    groups = httpx.get(address, timeout=PATIENCE).json()["data"]["groups"]
    assert len([rule for group in groups for rule in group["rules"]]) == len(queries.rules())
    wait(
        "every rule has been evaluated",
        lambda: all(
            rule["health"] == "ok"
            for group in httpx.get(address, timeout=PATIENCE).json()["data"]["groups"]
            for rule in group["rules"]
        ),
    )
    wait("the load is counted", lambda: stack.query("specops_generated_tokens_total")[0] > 0)


def test_grafana_opens_on_the_dashboard_without_login(stack: Stack) -> None:
    if "grafana" not in stack.services:
        pytest.skip("GRAFANA WAS NOT TESTED: its image cannot be pulled here")
    found = httpx.get(
        f"{stack.url('grafana')}/api/search", params={"type": "dash-db"}, timeout=PATIENCE
    ).json()
    assert len(found) == len(queries.DASHBOARDS)
    assert (
        httpx.get(f"{stack.url('grafana')}/api/dashboards/home", timeout=PATIENCE).status_code
        == 200
    )


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for clients; the clients' own time limits end them."""
    with ThreadPoolExecutor(max_workers=64) as threads:
        yield threads


def test_a_killed_service_breaks_its_streams_and_comes_back(
    stack: Stack, pool: ThreadPoolExecutor, tell: Tell
) -> None:
    arm = ("docker", "exec", "--interactive", stack.container("api"), "python", "-c", KILLER)
    with subprocess.Popen(
        arm, env=stack.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killer:
        assert killer.stdout.readline() == "ready\n"
        streams = [Stream(stack.url("api"), max_new_tokens=900) for _ in range(SLOTS)]
        followed: list[Future[None]] = [pool.submit(stream.follow) for stream in streams]
        wait("every stream has begun", lambda: all(stream.events for stream in streams))
        killer.stdin.write("now\n")
        killer.stdin.flush()
        for stream, future in zip(streams, followed, strict=True):
            with pytest.raises(httpx.TransportError):
                future.result()
            assert not stream.complete
    wait("started again", lambda: stack.inspect("api", "{{.RestartCount}}") == "1")
    wait("healthy again", lambda: stack.healthy("api"), 120)
    assert clients.generate(stack.url("api"), max_new_tokens=8)["generated_tokens"] == 8
    tokens = [len(stream.events) for stream in streams]
    tell(
        f"kill: SIGKILL after {tokens} events, each client had an error; "
        f"ready again {stack.seconds_to_ready():.1f} s after the restart"
    )


def in_flight(api: str) -> int:
    """Requests that run or wait."""
    health = httpx.get(f"{api}/health", timeout=PATIENCE).json()
    return int(health["running"]) + int(health["waiting"])


def done(streams: list[Stream]) -> int:
    """Streams that have ended."""
    return sum(stream.complete for stream in streams)


def test_a_stop_drains_requests_and_exits_with_0(
    stack: Stack, pool: ThreadPoolExecutor, tell: Tell
) -> None:
    api = stack.url("api")
    tokens, wanted_seconds = 900, 20
    one = clients.generate(api, max_new_tokens=tokens, ignore_eos=True, drafter="none")
    count = round(wanted_seconds * 1000 / one["latency_ms"])
    streams = [Stream(api, max_new_tokens=tokens) for _ in range(min(max(count, SLOTS + 1), 30))]
    followed = [pool.submit(stream.follow) for stream in streams]
    wait("everybody is in", lambda: in_flight(api) + done(streams) == len(streams))
    stopped = pool.submit(stack.compose, "stop", "api", check=False)
    wait(
        "it drains",
        lambda: httpx.get(f"{api}/health", timeout=PATIENCE).json()["state"] == "draining",
    )
    unfinished = sum(not stream.complete for stream in streams)
    assert unfinished > 0
    assert (
        httpx.post(f"{api}/generate", json={"prompt": PROMPT}, timeout=PATIENCE).status_code == 503
    )
    for stream, future in zip(streams, followed, strict=True):
        future.result()
        assert stream.complete
        assert stream.generated_tokens == tokens
    assert stopped.result().returncode == 0
    ended = stack.inspect("api", "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}")
    assert ended == "exited 0 false"
    tell(
        f"stop: {unfinished} of {len(streams)} requests were unfinished at SIGTERM, all were "
        "answered in full, exit status 0"
    )


def test_the_model_cache_outlives_the_containers(stack: Stack, tell: Tell) -> None:
    def prepared() -> list[str]:
        messages = [line["message"] for line in stack.logged("api")]
        return [text for text in messages if "laying out" in text or "converting " in text]

    stack.compose("down", "--volumes")
    stack.up()
    assert prepared()  # with an empty volume there is something to prepare
    first, cold = stack.container("api"), stack.seconds_to_ready()
    stack.compose("down")
    stack.up()
    assert stack.container("api") != first
    assert prepared() == []
    assert clients.generate(stack.url("api"), max_new_tokens=8)["generated_tokens"] == 8
    tell(
        f"ready {cold:.1f} s after the start with an empty volume, "
        f"{stack.seconds_to_ready():.1f} s with the volume of the run before"
    )


@contextmanager
def hog(stack: Stack) -> Iterator[Callable[[int], bool]]:
    """A process in the API's container; the function makes it grow, and says whether it lives."""
    command = ("docker", "exec", "--interactive", stack.container("api"), "python", "-c", HOG)
    with subprocess.Popen(
        command, env=stack.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders, words = process.stdin, process.stdout

        def grow(count: int) -> bool:
            os.write(orders.fileno(), f"{count}\n".encode())
            return words.readline() == b"held\n"

        yield grow


def figures(stack: Stack) -> dict[str, float]:
    """The series of the metrics page."""
    page = httpx.get(f"{stack.url('api')}/metrics", timeout=PATIENCE).text
    pairs = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in pairs}


def test_the_door_closes_before_the_cap_is_reached_and_who_breaks_it_is_killed(
    stack: Stack, pool: ThreadPoolExecutor, tell: Tell
) -> None:
    if len(Path("/proc/swaps").read_text().splitlines()) > 1:
        pytest.skip("this machine has swap, and twelve gigabytes of it would have to be filled")
    api, before = stack.url("api"), figures(stack)
    restarts = stack.inspect("api", "{{.RestartCount}}")
    free = int(before['specops_memory_bytes{kind="limit"}'])
    free -= int(before['specops_memory_bytes{kind="anon"}'])
    with hog(stack) as grow:
        assert grow(free - 2 * CLOSE)
        free = 2 * CLOSE
        shed = False
        while not shed:
            stream = Stream(api, max_new_tokens=900)  # an idle service refuses nobody
            followed = pool.submit(stream.follow)
            wait("the stream has begun", lambda events=stream.events: bool(events))
            while not shed and not followed.done():
                assert grow(STEP), "killed before anybody was refused"
                free -= STEP
                body = {"prompt": PROMPT, "max_new_tokens": 1}
                shed = httpx.post(f"{api}/generate", json=body, timeout=60).status_code == 429
            followed.result()
            assert stream.complete
        after = figures(stack)
        assert after['specops_requests_rejected_total{reason="memory"}'] > 0
        steps = 0
        while grow(CLOSE):
            steps += 1
            assert steps < 100, "the cap does not hold"
    assert stack.inspect("api", "{{.RestartCount}}") == restarts
    assert figures(stack)["specops_oom_kills_total"] > before["specops_oom_kills_total"]
    assert clients.generate(api, max_new_tokens=8)["generated_tokens"] == 8
    tell(
        f"another process in the container grew: 429 with {free / 1e6:.0f} MB left, running "
        "requests were answered; beyond the cap the kernel killed it, the service went on"
    )
