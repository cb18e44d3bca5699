"""compose.yaml, unchanged, on a Docker Engine: hardened, limited, watched, killed and drained."""

import json
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
from tests.e2e.conftest import Note
from tests.e2e.stack import SERVICES, UP, Stack
from tests.stack import queries
from tests.stack import test_load_page as load_page
from tests.waiting import PATIENCE, wait

pytestmark = pytest.mark.e2e

BYTES = {"m": 1 << 20, "g": 1 << 30}
SLOTS = 8  # requests that run at the same time by default
CLOSE, STEP = 64 << 20, 2 << 20  # bytes below the memory limit
MAX_IMAGE_BYTES = 450 * 10**6  # of the API's image, without weights
# Runs in the API's container: waits for a line, then kills the service as the kernel would. (After
# `docker kill` the engine does not start the container again.)
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
# Runs in the API's container: allocates as many bytes as each line says, and keeps them.
HOG = """
import sys
held = []
print("ready", flush=True)
for line in sys.stdin:
    held.append(b"x" * int(line))
    print("held", flush=True)
"""
# Runs in the API's container: tells what the process that renders chat templates has, then ends it,
# and tells how another one fares with hostile templates.
TEMPLATES = """
import json, os, pathlib, signal, time
from specops.text.confined_process import ProgramLimitExceeded
from specops.text.template_process import TemplateProcess

(own,) = [
    path.parent for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
    if b"specops.text.template_worker" in path.read_bytes() and path.parent.name != str(os.getpid())
]
rows = [line.split(":") for line in (own / "smaps_rollup").read_text().splitlines()[1:]]
found = {
    "status": dict(line.split(":\\t", 1) for line in (own / "status").read_text().splitlines()),
    "files": sorted(path.name for path in (own / "fd").iterdir()),
    "environment": [item.partition("=")[0] for item in (own / "environ").read_text().split("\\0")],
    "oom_score_adj": int((own / "oom_score_adj").read_text()),
    "private": sum(int(value.split()[0]) for name, value in rows if name.startswith("Private_")),
}
os.kill(int(own.name), signal.SIGKILL)
begin = time.monotonic()
process = TemplateProcess()
process.render("", {}, {})
found["start"] = time.monotonic() - begin
found["limits"], found["next"] = [], []
for source in (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{{ 'a' | indent('b' * 200000000) }}",
    "{{ lipsum(900, false, 6000, 6001) }}",
):
    try:
        process.render(source, {}, {})
    except ProgramLimitExceeded as error:
        found["limits"].append(str(error))
    begin = time.monotonic()
    assert process.render("{{ a }}", {}, {"a": 1}) == "1"
    found["next"].append(time.monotonic() - begin)
process.close()
print(json.dumps(found))
"""


def size(text: str) -> int:
    """Bytes of a size as Compose writes it: `512m`, `4g`."""
    return int(text[:-1]) * BYTES[text[-1]]


def series(stack: Stack) -> dict[str, float]:
    """The series of the API's metrics page."""
    page = httpx.get(f"{stack.url('api')}/metrics", timeout=PATIENCE).text
    pairs = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


@contextmanager
def helper(stack: Stack, program: str) -> Iterator[Callable[[object], str]]:
    """A program in the API's container; the function sends a line and returns the answer."""
    (container,) = stack.containers("api")
    command = ("docker", "exec", "--interactive", container, "python", "-c", program)
    with subprocess.Popen(
        command, env=stack.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders, words = process.stdin, process.stdout
        assert words.readline() == "ready\n"

        def send(line: object) -> str:
            orders.write(f"{line}\n")
            orders.flush()
            return words.readline()

        yield send


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_is_healthy_hardened_and_limited_by_the_kernel(
    stack: Stack, service: str, note: Note
) -> None:
    if service not in stack.services:
        pytest.skip(f"{service.upper()} WAS NOT TESTED: its image cannot be pulled here")
    stack.compose(*UP, service)
    assert stack.healthy(service)
    assert stack.inspect(service, "{{.RestartCount}}") == "0"

    status = stack.read(service, "/proc/1/status")
    assert status is not None
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    user, group = SERVICES[service]["user"].split(":")
    assert fields["Uid"].split() == [user] * 4
    assert fields["Gid"].split() == [group] * 4
    assert user != "0"
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[kind], 16) == 0, kind
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")

    (container,) = stack.containers(service)
    as_root = ("exec", "--user", "0", container, "touch", "/probe")
    assert "Read-only file system" in stack.engine.docker(*as_root, check=False).stderr

    limit = size(SERVICES[service]["mem_limit"])
    found = stack.read(service, "/sys/fs/cgroup/memory.max") or stack.read(
        service, "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    assert found is not None
    assert int(found) == limit
    note(f"memory limit of {service}, in its cgroup: {int(found):,} bytes")


def test_chat_templates_are_rendered_by_a_process_that_reaches_nothing(
    stack: Stack, note: Note
) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}]}

    def render() -> str:
        answer = httpx.post(f"{stack.url('api')}/apply-template", json=asked, timeout=PATIENCE)
        return str(answer.raise_for_status().json()["prompt"])

    before, text = series(stack), render()
    found = json.loads(stack.execute("api", "python", "-c", TEMPLATES).stdout)
    status = found["status"]
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert int(status["Seccomp_filters"]) >= 2  # the container's and its own
    assert status["Uid"].split() == ["10001"] * 4
    assert found["files"] == ["0", "1"]
    assert set(found["environment"]) <= {"", "TZ", "LC_CTYPE", "OPENBLAS_NUM_THREADS"}
    assert found["oom_score_adj"] == 1000
    long, large = "it takes longer than 1 s", "it takes too much memory"
    assert found["limits"] == [long, large, long]
    assert render() == text
    crashes = 'specops_template_processes_ended_total{kind="crash"}'
    assert series(stack)[crashes] == before[crashes] + 1
    note(
        f"chat templates: a process with {found['private'] / 1000:.1f} MB of its own, started in "
        f"{found['start']:.2f} s; after hostile templates the next was rendered within "
        f"{max(found['next']):.2f} s"
    )


def test_the_kernel_enforces_the_swap_limit(stack: Stack, note: Note) -> None:
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
    note(f"swap limit of api, in its cgroup: {int(swap):,} bytes")


def test_the_service_knows_its_limit_its_plan_and_its_processor(stack: Stack, note: Note) -> None:
    answer = clients.generate(stack.url("api"), max_new_tokens=16)
    assert answer["generated_tokens"] == 16
    promised = {"generated_text", "tokens_per_second", "avg_tokens_per_jump", "latency_ms"}
    assert promised <= set(answer)
    found = series(stack)
    limit = size(SERVICES["api"]["mem_limit"])
    assert found['specops_memory_bytes{kind="limit"}'] == limit
    (info,) = (name for name in found if name.startswith("specops_model_info{"))
    (computed_by,) = re.findall(r'kernels="([^"]+)"', info)
    assert computed_by == kernels.kernel()
    note(f"products with weights are computed by {computed_by}")
    messages = [line["message"] for line in stack.logged("api")]
    plan = [line.removeprefix("memory: ") for line in messages if line.startswith("memory: ")]
    (first, *_) = (number for number, line in enumerate(plan) if line.startswith("limit"))
    assert f"{limit / 1e6:,.1f} MB" in plan[first]
    assert "cgroup v" in plan[first]
    for line in plan[: first + 7]:
        note(f"plan: {line}")


def test_the_image_has_no_tools_to_build_with_and_a_small_size(stack: Stack, note: Note) -> None:
    program = "command -v gcc cc g++ make; ls /opt/specops/venv/bin/pip; "
    program += "du -skc /opt/specops/models /opt/specops/venv/share | tail -1"
    found = stack.execute("api", "sh", "-c", program)
    weights_kib, path = found.stdout.split()  # and no other line: none of the programs is there
    assert path == "total"
    template = (
        "{{.Size}} {{.Config.User}} {{json .Config.Healthcheck.Test}} {{json .Config.Labels}}"
    )
    image = stack.inspect("api", "{{.Image}}")
    described = stack.engine.docker("image", "inspect", "--format", template, image).stdout
    bytes_in_all, user, rest = described.split(maxsplit=2)
    assert user == SERVICES["api"]["user"]
    assert '["CMD",' in rest
    assert '"org.opencontainers.image.licenses":"Apache-2.0"' in rest
    without_weights = int(bytes_in_all) - int(weights_kib) * 1024
    assert without_weights < MAX_IMAGE_BYTES
    note(f"image of api: {without_weights / 1e6:,.0f} MB without the models")


def test_a_load_from_its_container_shows_on_the_whole_first_page(stack: Stack, note: Note) -> None:
    stack.compose(*UP, "locust")
    page = stack.url("locust")
    _, form = load_page.form_of(page)
    begun = load_page.post(page, "swarm", form | {"user_count": 2, "spawn_rate": 2})
    assert begun["success"], begun
    wait("the target is up", lambda: stack.query('up{job="specops"}') == [1.0])
    for panel, asked in queries.by_panel("healthy", queries.LOADED).items():
        wait(f"{panel} has data", lambda asked=asked: any(map(stack.query, asked)))

    def rules() -> list[str]:
        address = f"{stack.url('prometheus')}/api/v1/rules"
        groups = httpx.get(address, timeout=PATIENCE).json()["data"]["groups"]
        return [rule["health"] for group in groups for rule in group["rules"]]

    wait("every rule is evaluated", lambda: rules() == ["ok"] * len(queries.rules()))
    load_page.post(page, "stop")
    wait("the load ends", lambda: load_page.stats(page)["state"] == "stopped")
    wait("all is counted", lambda: len(set(load_page.counts(page))) == 1)
    report = httpx.get(f"{page}/stats/report?download=1", timeout=PATIENCE).text
    assert "TPOT: time per output token" in report
    found = load_page.stats(page)
    assert found["errors"] == []
    rows = {(row["method"], row["name"]): row for row in found["stats"]}
    for name in ("/generate", "/generate (stream)"):
        row = rows["POST", name]
        assert (row["num_requests"] > 0, row["num_failures"]) == (True, 0)
        note(f"load from its container: {name} {row['num_requests']} times, none failed")


def test_grafana_opens_on_the_dashboard_without_login(stack: Stack) -> None:
    if "grafana" not in stack.services:
        pytest.skip("GRAFANA WAS NOT TESTED: its image cannot be pulled here")
    with httpx.Client(base_url=stack.url("grafana"), timeout=PATIENCE) as client:
        found = client.get("/api/search", params={"type": "dash-db"}).json()
        assert len(found) == len(queries.DASHBOARDS)
        assert client.get("/api/dashboards/home").status_code == 200


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for clients; the clients' own time limits end them."""
    with ThreadPoolExecutor(max_workers=64) as threads:
        yield threads


def test_a_killed_service_breaks_its_streams_and_comes_back(
    stack: Stack, pool: ThreadPoolExecutor, note: Note
) -> None:
    with helper(stack, KILLER) as kill:
        streams = [Stream(stack.url("api"), max_new_tokens=900) for _ in range(SLOTS)]
        followed: list[Future[None]] = [pool.submit(stream.follow) for stream in streams]
        wait("every stream has begun", lambda: all(stream.events for stream in streams))
        kill("now")
        for stream, future in zip(streams, followed, strict=True):
            with pytest.raises(httpx.TransportError):
                future.result()
            assert not stream.complete
    wait("started again", lambda: stack.inspect("api", "{{.RestartCount}}") == "1")
    wait("healthy again", lambda: stack.healthy("api"), 120)
    assert clients.generate(stack.url("api"), max_new_tokens=8)["generated_tokens"] == 8
    note(
        f"kill: SIGKILL after {[len(stream.events) for stream in streams]} events, each client had "
        f"an error; ready again {stack.seconds_to_ready():.1f} s after the restart"
    )


def test_a_stop_drains_requests_and_exits_with_0(
    stack: Stack, pool: ThreadPoolExecutor, note: Note
) -> None:
    api, tokens, wanted_seconds = stack.url("api"), 900, 10

    def health() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{api}/health", timeout=PATIENCE).json()
        return found

    def taken() -> int:
        """Requests that run, wait or have ended."""
        now = health()
        ended = sum(stream.complete for stream in streams)
        return int(now["running"]) + int(now["waiting"]) + ended

    one = clients.generate(api, max_new_tokens=tokens, drafter="none")
    count = round(wanted_seconds * 1000 / one["latency_ms"])
    streams = [Stream(api, max_new_tokens=tokens) for _ in range(min(max(count, SLOTS + 1), 30))]
    followed = [pool.submit(stream.follow) for stream in streams]
    wait("all are in", lambda: taken() == len(streams))
    stopped = pool.submit(stack.compose, "stop", "api", check=False)
    wait("it drains", lambda: health()["state"] == "draining")
    unfinished = sum(not stream.complete for stream in streams)
    assert unfinished > 0
    refused = httpx.post(f"{api}/generate", json={"prompt": PROMPT}, timeout=PATIENCE)
    assert refused.status_code == 503
    for stream, future in zip(streams, followed, strict=True):
        future.result()
        assert stream.complete
        assert stream.events[-1]["generated_tokens"] == tokens
    assert stopped.result().returncode == 0
    ended = stack.inspect("api", "{{.State.Status}} {{.State.ExitCode}} {{.State.OOMKilled}}")
    assert ended == "exited 0 false"
    note(
        f"stop: {unfinished} of {len(streams)} requests were unfinished at SIGTERM, all were "
        "answered in full, exit status 0"
    )


def test_the_model_cache_outlives_the_containers(stack: Stack, note: Note) -> None:
    def prepared() -> list[str]:
        messages = [line["message"] for line in stack.logged("api")]
        return [text for text in messages if "laying out" in text or "converting " in text]

    stack.compose("down", "--volumes")
    stack.up()
    assert prepared()  # the empty volume has nothing
    first, cold = stack.containers("api"), stack.seconds_to_ready()
    stack.compose("down")
    stack.up()
    assert stack.containers("api") != first
    assert prepared() == []
    assert clients.generate(stack.url("api"), max_new_tokens=8)["generated_tokens"] == 8
    note(
        f"ready {cold:.1f} s after the start with an empty volume, "
        f"{stack.seconds_to_ready():.1f} s with the volume of the run before"
    )


def test_requests_are_refused_below_the_limit_and_another_process_is_killed_above_it(
    stack: Stack, pool: ThreadPoolExecutor, note: Note
) -> None:
    if len(Path("/proc/swaps").read_text().splitlines()) > 1:
        pytest.skip("this machine has swap: the test would have to fill twelve gigabytes of it")
    api, before = stack.url("api"), series(stack)
    restarts = stack.inspect("api", "{{.RestartCount}}")
    free = int(before['specops_memory_bytes{kind="limit"}'])
    free -= int(before['specops_memory_bytes{kind="anon"}'])
    with helper(stack, HOG) as grow:
        assert grow(free - 2 * CLOSE) == "held\n"
        free = 2 * CLOSE
        shed = False
        while not shed:
            stream = Stream(api, max_new_tokens=900)  # an idle service refuses no request
            followed = pool.submit(stream.follow)
            wait("the stream has begun", lambda events=stream.events: bool(events))
            while not shed and not followed.done():
                assert grow(STEP) == "held\n", "killed before a request was refused"
                free -= STEP
                body = {"prompt": PROMPT, "max_new_tokens": 1}
                shed = httpx.post(f"{api}/generate", json=body, timeout=60).status_code == 429
            followed.result()
            assert stream.complete
        assert series(stack)['specops_requests_rejected_total{reason="memory"}'] > 0
        steps = 0
        while grow(CLOSE) == "held\n":
            steps += 1
            assert steps < 100, "the limit does not hold"
    assert stack.inspect("api", "{{.RestartCount}}") == restarts
    assert series(stack)["specops_oom_kills_total"] > before["specops_oom_kills_total"]
    assert clients.generate(api, max_new_tokens=8)["generated_tokens"] == 8
    note(
        f"another process in the container grew: 429 with {free / 1e6:.0f} MB left, running "
        "requests were answered; above the limit the kernel killed it, the service went on"
    )
