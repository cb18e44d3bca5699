"""The real stack without Docker: API on the demo pair, Prometheus and Locust as processes."""

from __future__ import annotations

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

from specops.metrics.metrics import Metrics
from tests.stack import queries
from tests.stack.support import ROOT, Finished, NativeStack, native_stack, run, tool
from tests.waiting import PATIENCE

pytestmark = pytest.mark.e2e

SCRAPE_SECONDS = 60.0
Answers = dict[str, list[float]]  # the values of a query's series, by panel and legend


class Stack(NativeStack):
    """`make up`, and what its tests ask of it."""

    def make(self, target: str, *arguments: str) -> Finished:
        return run("make", target, f"ARGS={' '.join(arguments)}", env=self.env, timeout=300)

    def query(self, promql: str, at: float | None = None) -> list[float]:
        """The values of an expression, now or at that time, through Prometheus' HTTP API."""
        asked = {"query": promql} if at is None else {"query": promql, "time": str(at)}
        body = httpx.get(f"{self.prometheus}/api/v1/query", params=asked, timeout=PATIENCE).json()
        assert body["status"] == "success", body
        return [float(series["value"][1]) for series in body["data"]["result"]]

    def all_panels(self, at: float | None = None) -> Answers:
        return {name: self.query(expr, at) for name, expr in queries.dashboard_queries()}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if tool("prometheus") is None:
        pytest.skip("no Prometheus here")
    with native_stack(tmp_path_factory.mktemp("stack")) as running:
        yield Stack(**vars(running))


@pytest.fixture(scope="module")
def idle(stack: Stack) -> Answers:
    """What every panel shows before the first request."""
    recorded = [name for name in queries.recorded() if name.startswith(("specops:", "instance:"))]
    stack.wait(
        "scraped and rules evaluated",
        lambda: stack.query("up") == [1.0] and all(map(stack.query, recorded)),
        SCRAPE_SECONDS,
    )
    return stack.all_panels()


@dataclass(frozen=True)
class Load:
    """A load test that has just run, and been scraped."""

    finished: Finished
    ended: float  # seconds of `time.time()`
    page: Path  # the HTML report; the others lie beside it
    tokens: float  # by which the API's own counter grew
    report: dict[str, Any]  # loadtest/record.py
    rows: dict[str, dict[str, Any]]  # Locust's own, by kind of event and name


def counted(stack: Stack, name: str) -> float:
    """A counter without labels, from the API itself."""
    page = httpx.get(f"{stack.api}/metrics", timeout=PATIENCE).text
    (value,) = re.findall(rf"^{name} (\S+)$", page, flags=re.MULTILINE)
    return float(value)


def run_load(stack: Stack, *options: str) -> Load:
    """Run a load test, and wait until Prometheus has seen all of it."""
    name = "specops_generated_tokens_total"
    before = counted(stack, name)
    rows = Path(stack.env["NATIVE_STATE"]) / "rows"
    finished = stack.make("load", *options, "--json-file", str(rows))
    ended = time.time()
    after = counted(stack, name)
    stack.wait("the load was scraped", lambda: stack.query(name) == [after], SCRAPE_SECONDS)
    (report,) = re.findall(r"^Report: (.*\.html)$", finished.stdout, flags=re.MULTILINE)
    page = ROOT / report
    # As JSON, not CSV: Locust writes that once a second, and not again at the end.
    found = json.loads(rows.with_suffix(".json").read_text())
    return Load(
        finished,
        ended,
        page,
        after - before,
        json.loads(page.with_suffix(".stages.json").read_text()),
        {f"{row['method']} {row['name']}": row for row in found},
    )


@pytest.fixture(scope="module")
def load(stack: Stack, idle: Answers) -> Load:
    """The shape `smoke`."""
    return run_load(stack, "--shape", "smoke")


def totals(output: str) -> list[dict[str, int]]:
    """What the load test's closing line says."""
    pattern = r"(\d+) answered, (\d+) shed \(429\), (\d+) failed; (\d+) tokens"
    names = ("answered", "shed", "failed", "tokens")
    return [dict(zip(names, map(int, found), strict=True)) for found in re.findall(pattern, output)]


def test_no_panel_is_empty_or_nan_before_the_first_request(idle: Answers) -> None:
    assert {name for name, values in idle.items() if not values} == set()
    assert {name for name, values in idle.items() if any(map(math.isnan, values))} == set()


# What moves without requests: the model, the machine, and room for both.
NOT_TRAFFIC = {"Model", "Ready for", "Queue", "Processors used", "Processors", "Swap"}
NOT_TRAFFIC |= {"Memory used of the cap", "Anonymous memory of the cap", "Memory against the cap"}
NOT_TRAFFIC |= {"Time lost for lack of memory", "Time lost for memory", "Tokens in the KV cache"}
NOT_TRAFFIC |= {"Page faults per second", "Disk in use", "Disk of the models", "Swap in use"}
NOT_TRAFFIC |= {"Gain over plain decoding", "Gain over time"}  # 1 where nothing is gained
NOT_TRAFFIC |= {"Cost of a pass, by its tokens", "Cost of a token, a draft token, attention"}
NOT_TRAFFIC |= {"KV blocks"}  # free ones
NOT_TRAFFIC |= {"Replicas"}
NOT_TRAFFIC |= {"Throttled", "Stopped by the processor quota", "Killed for memory, and restarts"}


def title(name: str) -> str:
    """`dashboard / panel: legend` → `panel`."""
    return name.split(" / ")[1].split(": ", maxsplit=1)[0]


def test_figures_of_traffic_are_zero_before_the_first_request(idle: Answers) -> None:
    wrong = {
        name: values
        for name, values in idle.items()
        if any(values) and title(name) not in NOT_TRAFFIC
    }
    assert wrong == {}


def test_nothing_is_red_before_the_first_request(idle: Answers) -> None:
    # What the machine is like, and what else runs on it, is not the service's doing.
    machine = {"Disk in use", "Swap in use", "Throttled", "Time lost for memory"}
    machine |= {"Memory used of the cap", "Anonymous memory of the cap"}
    shown = {name: values[0] for name, values in idle.items() if values}
    for name, panel in queries.panels():
        if panel["type"] != "stat" or panel["title"] in machine:
            continue
        (value,) = (v for n, v in shown.items() if n.startswith(f"{name} / {panel['title']}: "))
        colour = [
            step["color"]
            for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
            if step["value"] is None or value >= step["value"]
        ][-1]
        assert colour == "green", f"{name} / {panel['title']} is {colour} at {value}"


def test_generate_answers_with_the_promised_fields(stack: Stack, idle: Answers) -> None:
    body = {"prompt": "def add(a, b):\n", "max_new_tokens": 16, "k_draft": 3}
    answer = httpx.post(f"{stack.api}/generate", json=body, timeout=60).json()
    assert isinstance(answer["generated_text"], str)
    assert answer["tokens_per_second"] >= 0
    assert answer["avg_tokens_per_jump"] >= 0
    assert answer["latency_ms"] > 0


def test_a_load_test_passes_and_writes_its_report(load: Load) -> None:
    finished = load.finished
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (total,) = totals(finished.stdout)
    assert total["answered"] > 0
    assert total["failed"] == 0
    assert "<html" in load.page.read_text()


def assert_same_tokens(load: Load) -> None:
    """What Locust added up, what the answers said and what the service counted differ by 0."""
    (total,) = totals(load.finished.stdout)
    by_locust = load.rows["TOKENS per request"]["total_response_time"]
    assert by_locust == total["tokens"] == load.report["whole"]["tokens"] == load.tokens > 0


def test_locust_and_the_service_count_the_same_tokens(load: Load) -> None:
    assert_same_tokens(load)


def felt(load: Load, q: float) -> dict[str, float]:
    """A quantile of the latency in seconds, as the load test's CSV has it and by Locust's rows.

    Not by Locust's own CSV: it is written once a second and lacks what came in the last one.
    """
    with load.page.with_suffix(".stages.csv").open() as lines:
        (stage,) = csv.DictReader(lines)
    times: Counter[float] = Counter()
    for name, row in load.rows.items():
        if name.startswith("POST "):
            times.update({float(ms) / 1000: n for ms, n in row["response_times"].items()})
    return {
        "csv": float(stage[f"latency_p{q * 100:g}"]),
        "locust": sorted(times.elements())[math.ceil(q * times.total()) - 1],
    }


@pytest.mark.parametrize("source", ["csv", "locust"])
@pytest.mark.parametrize("q", [0.5, 0.95])
def test_latencies_agree_by_their_buckets(stack: Stack, load: Load, q: float, source: str) -> None:
    bounds = sorted(
        float(sample.labels["le"])
        for family in Metrics().registry.collect()
        for sample in family.samples
        if sample.name == "specops_latency_seconds_bucket"
    )
    buckets = "sum by (le) (specops_latency_seconds_bucket)"
    (served,) = stack.query(f"histogram_quantile({q}, {buckets})")
    seen = felt(load, q)[source]
    places = [bisect.bisect_left(bounds, seconds) for seconds in (served, seen)]
    # A client feels its own delays besides, which on a busy machine are a short request's own time.
    assert -1 <= places[1] - places[0] <= 2, f"{served:.4g} s served, {seen:.4g} s felt"


def test_every_panel_has_data_after_the_load(stack: Stack, load: Load) -> None:
    # As they were then: the last minute of a busy machine may be over when all have been asked.
    answers = stack.all_panels(load.ended)
    for name, values in answers.items():
        print(f"{name} → {', '.join(f'{value:g}' for value in values)}")
    assert {name for name, values in answers.items() if not values} == set()
    assert {name for name, values in answers.items() if any(map(math.isnan, values))} == set()
    moved = {title(name) for name, values in answers.items() if any(values)}
    assert moved >= {
        *("Tokens per second", "Tokens per jump", "Tokens per pass over time"),
        *("Two counts of tokens per pass", "Draft tokens accepted, by drafter"),
        *("Accepted, by position", "Draft length", "Draft length, by drafter", "Hits and misses"),
        *("Draft tokens per second", "A mean request", "A second of the engine"),
        *("Time per pass, by kind", "Passes and requests per pass", "Tokens per pass, by use"),
        *("Prompt tokens, offered and used", "KV blocks", "Latency", "Queue wait"),
        *("Time to first token", "Time between tokens", "Requests per second, by outcome"),
        *("Memory against the cap", "Processors", "Disk of the models"),
    }
    assert answers["healthy / Tokens per jump: tokens per jump"][0] >= 1


def test_rules_have_the_names_of_opentelemetry_too(stack: Stack, load: Load) -> None:
    ours = stack.query("specops_latency_seconds_count")
    stack.wait(
        "the rule has seen the last request",
        lambda: stack.query("gen_ai_server_request_duration_seconds_count") == ours,
        SCRAPE_SECONDS,
    )
    assert ours > [0]


def test_a_load_test_leaves_a_mark(stack: Stack, load: Load) -> None:
    assert stack.query('specops_load_test_requests_total{shape="smoke"}') > [0]


@pytest.mark.parametrize("api", ["openai", "chat"])
def test_openais_routes_count_the_same_tokens(stack: Stack, load: Load, api: str) -> None:
    found = run_load(stack, "--shape", "smoke", "--time-scale", "0.2", "--api", api)
    assert found.finished.returncode == 0, found.finished.stdout + found.finished.stderr
    assert found.report["api"] == api
    assert_same_tokens(found)


def test_the_page_of_metrics_has_the_promised_names(stack: Stack, load: Load) -> None:
    page = httpx.get(f"{stack.api}/metrics", timeout=PATIENCE).text
    assert "# TYPE specops_latency_seconds histogram" in page
    assert "# TYPE specops_avg_jump gauge" in page


def test_a_second_stack_is_told_that_the_port_is_taken(stack: Stack) -> None:
    env = {**stack.env, "NATIVE_STATE": f"{stack.env['NATIVE_STATE']}-2"}
    second = run("scripts/up", "--native", env=env)
    assert second.returncode == 1
    assert "SPECOPS_PORT=…" in second.stderr


def test_it_ends_cleanly_and_leaves_nothing_running(stack: Stack) -> None:
    assert stack.make("down").returncode == 0
    assert stack.process.wait(60) == 0
    assert "Ended." in stack.output.read_text().splitlines()
    for url in (stack.api, stack.prometheus):
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
