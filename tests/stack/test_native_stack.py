"""The real stack without Docker: API on the default model, Prometheus and Locust as processes."""

import bisect
import csv
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from grafana.empty import Empty
from grafana.promql import GONE
from specops.metrics.metrics import Metrics
from tests.stack import queries
from tests.stack.support import ROOT, Finished, NativeStack, native_stack, run, tool
from tests.waiting import PATIENCE

pytestmark = pytest.mark.e2e

PANELS = queries.panels()
SCRAPE_SECONDS = 60.0
TOKENS = "specops_generated_tokens_total"
Answers = dict[str, list[float]]  # the values of a query's series, by panel and legend


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeStack]:
    if tool("prometheus") is None:
        pytest.skip("no Prometheus here")
    with native_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


def all_panels(stack: NativeStack, at: float) -> Answers:
    """All panels at one moment: a busy machine takes long to read them, and may miss a scrape."""
    return {name: stack.query(expr, at) for name, expr in queries.dashboard_queries()}


@pytest.fixture(scope="module")
def idle(stack: NativeStack) -> Answers:
    """The values of every panel before the first request."""
    ready = 'specops_model_state{state="ready"}'
    recorded = "instance:specops_queue_used:ratio"
    (rate,) = queries.by_panel("healthy")["Requests per second"]  # needs a second scrape
    stack.wait(
        "scraped twice and rules evaluated",
        lambda: [stack.query(q) for q in (ready, recorded, rate)] == [[1.0], [0.0], [0.0]],
        SCRAPE_SECONDS,
    )
    found = all_panels(stack, time.time())
    (model,) = httpx.get(f"{stack.api}/v1/models", timeout=PATIENCE).json()["data"]
    assert model["id"] == "smollm2"  # the default, which `make up` fetches
    return found


@dataclass(frozen=True)
class Load:
    """A load test that has just run, and of which Prometheus has seen everything.

    Attributes:
        ended: when it ended, in seconds of `time.time()`.
        scraped: when Prometheus had seen its end.
        page: the HTML report; its other files lie beside it.
        tokens: the growth of the API's own counter.
        report: figures of loadtest/record.py.
        rows: Locust's own figures, by kind of event and name.
    """

    finished: Finished
    ended: float
    scraped: float
    page: Path
    tokens: float
    report: dict[str, Any]
    rows: dict[str, dict[str, Any]]

    def totals(self) -> dict[str, int]:
        """What the load test's last line says."""
        pattern = r"(\d+) answered, (\d+) refused \(429\), (\d+) failed; (\d+) tokens"
        (found,) = re.findall(pattern, self.finished.stdout)
        names = ("answered", "refused", "failed", "tokens")
        return dict(zip(names, map(int, found), strict=True))


def run_load(stack: NativeStack, *options: str) -> Load:
    def counted() -> float:
        page = httpx.get(f"{stack.api}/metrics", timeout=PATIENCE).text
        (value,) = re.findall(rf"^{TOKENS} (\S+)$", page, flags=re.MULTILINE)
        return float(value)

    before = counted()
    rows = Path(stack.env["NATIVE_STATE"]) / "rows"
    arguments = ("--shape", "smoke", *options, "--json-file", str(rows))
    finished = run("make", "load", f"ARGS={' '.join(arguments)}", env=stack.env, timeout=300)
    ended, after = time.time(), counted()
    stack.wait("the load was scraped", lambda: stack.query(TOKENS) == [after], SCRAPE_SECONDS)
    (report,) = re.findall(r"^Report: (.*\.html)$", finished.stdout, flags=re.MULTILINE)
    page = ROOT / report
    return Load(
        finished,
        ended,
        time.time(),
        page,
        after - before,
        json.loads(page.with_suffix(".stages.json").read_text()),
        {
            f"{row['method']} {row['name']}": row
            for row in json.loads(rows.with_suffix(".json").read_text())
        },
    )


@pytest.fixture(scope="module")
def load(stack: NativeStack, idle: Answers) -> Load:
    # Short enough for the 20 answers without which a panel shows no quantile.
    return run_load(stack, "--length-scale", "0.2")


def title(name: str) -> str:
    """`dashboard / panel: legend` → `panel`."""
    return name.split(" / ")[1].split(": ", maxsplit=1)[0]


# States in which a service is before its first request.
TRAFFIC = {
    *(Empty.IDLE, Empty.NO_REQUESTS, Empty.NO_PROMPTS, Empty.NO_DRAFTS, Empty.NO_SUGGESTIONS),
}
# What depends on the machine and on other work of it.
MACHINE = {"Disk in use", "Swap in use", "Throttled", "Lost for memory", "Memory of the cap"}


def test_before_the_first_request_nothing_of_traffic_has_a_value_and_nothing_is_red(
    idle: Answers,
) -> None:
    shown = {name: values for name, values in idle.items() if values}
    traffic = {panel["title"] for _, panel in PANELS if queries.empty_when(panel) in TRAFFIC}
    assert {title(name) for name in shown} & traffic == set()
    assert [GONE] not in shown.values()
    assert shown["healthy / State: idle"] == shown["healthy / Alerts: none"] == [1.0]
    assert shown["healthy / Requests per second: requests per second"] == [0.0]
    for name, panel in queries.panels():
        prefix = f"{name} / {panel['title']}: "
        found = [values[0] for panel, values in shown.items() if panel.startswith(prefix)]
        if panel["type"] != "stat" or panel["title"] in MACHINE or not found:
            continue
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        reached = [s["color"] for s in steps if s["value"] is None or found[0] >= s["value"]]
        assert reached[-1] != "red", f"{prefix}{found[0]}"


@pytest.mark.parametrize("api", ["", "openai", "chat"])
def test_locust_the_answers_and_the_service_count_the_same_tokens(
    stack: NativeStack, load: Load, api: str
) -> None:
    found = run_load(stack, "--time-scale", "0.2", "--api", api) if api else load
    assert found.finished.returncode == 0, found.finished.stdout + found.finished.stderr
    totals = found.totals()
    assert totals["answered"] > 0
    assert totals["failed"] == 0
    assert totals["tokens"] == found.report["whole"]["output_tokens"] == found.tokens > 0
    requests = sum(row["num_requests"] for row in found.rows.values())
    assert requests == totals["answered"] + totals["refused"]
    assert "<html" in found.page.read_text()
    assert found.report["api"] == (api or "generate")
    assert stack.query('specops_load_test_requests_total{shape="smoke"}') > [0]


@pytest.mark.parametrize("q", [0.5, 0.95])
def test_latencies_agree_by_their_buckets(stack: NativeStack, load: Load, q: float) -> None:
    bounds = sorted(
        float(sample.labels["le"])
        for family in Metrics().registry.collect()
        for sample in family.samples
        if sample.name == "specops_latency_seconds_bucket"
    )
    buckets = f"sum by (le) (specops_latency_seconds_bucket @ {load.scraped:.3f})"
    (served,) = stack.query(f"histogram_quantile({q}, {buckets})")
    with load.page.with_suffix(".stages.csv").open() as lines:
        (stage,) = csv.DictReader(lines)
    times: Counter[float] = Counter()
    for name, row in load.rows.items():
        if name.startswith("POST "):
            times.update({float(ms) / 1000: n for ms, n in row["response_times"].items()})
    by_locust = sorted(times.elements())[math.ceil(q * times.total()) - 1]
    for felt in (float(stage[f"latency_p{q * 100:g}"]), by_locust):
        distance = bisect.bisect_left(bounds, felt) - bisect.bisect_left(bounds, served)
        # A client also measures its own delays, which on a busy machine are as long as a request.
        assert -1 <= distance <= 3, f"{served:.4g} s served, {felt:.4g} s felt"


def test_every_panel_has_data_after_the_load_that_may_not_be_empty_then(
    stack: NativeStack, load: Load
) -> None:
    # At the time of the load: on a busy machine its last minute may be over by now.
    answers = all_panels(stack, load.ended)
    states = {*queries.LOADED, Empty.NO_DRAFTS}
    wanted = {f"{n} / {p['title']}" for n, p in PANELS if queries.empty_when(p) in states}
    assert wanted - {name.rpartition(": ")[0] for name in answers if answers[name]} == set()
    assert [GONE] not in answers.values()
    assert answers["healthy / Average jump length: tokens per pass"][0] >= 1


def test_series_have_their_promised_names_and_those_of_opentelemetry(
    stack: NativeStack, load: Load
) -> None:
    page = httpx.get(f"{stack.api}/metrics", timeout=PATIENCE).text
    assert "# TYPE specops_latency_seconds histogram" in page
    assert "# TYPE specops_avg_jump gauge" in page
    ours = stack.query("specops_latency_seconds_count")
    assert ours > [0]
    stack.wait(
        "the rule has seen the last request",
        lambda: stack.query("gen_ai_server_request_duration_seconds_count") == ours,
        SCRAPE_SECONDS,
    )


def test_every_address_that_is_printed_answers(stack: NativeStack) -> None:
    output = stack.output.read_text()
    urls = re.findall(r"http://[\w.:/]+", output[output.index("Ready.") :])
    assert f"{stack.api}/docs" in urls
    assert urls.count(stack.prometheus) == 2  # the second is what a Grafana of one's own is given
    assert any(url.endswith("/alerts") for url in urls)
    for url in urls:
        assert httpx.get(url, timeout=PATIENCE, follow_redirects=True).status_code == 200, url


def test_a_second_stack_is_refused_and_the_first_one_ends_cleanly(stack: NativeStack) -> None:
    env = {**stack.env, "NATIVE_STATE": f"{stack.env['NATIVE_STATE']}-2"}
    second = run("scripts/up", "--native", env=env)
    assert second.returncode == 1
    assert "SPECOPS_PORT=…" in second.stderr
    assert run("make", "down", env=stack.env).returncode == 0
    assert stack.process.wait(60) == 0
    assert "Stopped." in stack.output.read_text().splitlines()
    for url in (stack.api, stack.prometheus):
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
