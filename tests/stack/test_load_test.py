"""The load test against a stand-in API: what it counts, and when it says that something failed."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.shapes import SHAPES, Stage, stage_at
from specops.metrics.metrics import LOAD_SHAPES
from tests.loopback import Handler, listening
from tests.stack.support import ROOT, run, tool

SPEED = 42.0  # however fast its pieces arrive
ANSWER = {"generated_text": "abc", "generated_tokens": 3, "finish_reason": "length"}
ANSWER |= {"tokens_per_second": SPEED}
STEPS = (
    {"text": "a", "tokens": [{"id": 1, "text": "a", "origin": "target"}]},
    {"text": "bc", "tokens": [{"id": n, "text": "b", "origin": "draft"} for n in (2, 3)]},
)


class StandIn(Handler):
    """Answers as the API does; every third request gets what `odd_one` says."""

    odd_one = "answer"
    chat = False
    asked: list[dict[str, Any]]
    served = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = self.body()
        assert body.get("prompt") or body["messages"][0]["content"]
        self.asked.append(body)
        with self.lock:
            type(self).served += 1
            odd = self.odd_one if self.served % 3 == 0 else "answer"
        if odd == "shed":
            self.reply(429, {}, {"Retry-After": "0"})
        elif odd == "fail":
            self.reply(500, {})
        elif self.path.startswith("/v1/"):
            assert body["model"] == "it"
            assert ("messages" in body) == ("chat" in self.path)
            self.reply_as_openai(stream=bool(body.get("stream")))
        elif body.get("stream"):
            events = [*STEPS] if odd == "cut" else [*STEPS, ANSWER]
            self.stream(events)
        else:
            self.reply(200, ANSWER)

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.reply(200, {"data": [{"id": "it", "chat": self.chat}]})

    def reply_as_openai(self, *, stream: bool) -> None:
        usage = {"usage": {"completion_tokens": 3}, "choices": []}
        usage |= {"timings": {"predicted_per_second": SPEED}}
        if not stream:
            self.reply(200, usage)
            return
        deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "bc"}]
        said = [{"text": delta["content"]} for delta in deltas]
        said = [{"delta": delta} for delta in deltas] if "chat" in self.path else said
        chunks = [{"choices": [choice], "usage": None} for choice in said]
        self.stream([*chunks, usage])

    def stream(self, events: list[Any]) -> None:
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        content = f"{text}data: [DONE]\n\n".encode()
        self.reply(200, content, {"Content-Type": "text/event-stream"})


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a stand-in listens; `request.param` is what every third request gets."""
    fields = {"odd_one": request.param, "served": 0, "asked": []}
    with listening(type("Handler", (StandIn,), fields)) as port:
        yield f"http://127.0.0.1:{port}"


Run = tuple[int, dict[str, dict[str, Any]], str]


def run_locust(url: str, folder: Path, *options: str) -> Run:
    """Exit status, Locust's final rows by kind of event and name, and the output.

    The rows are read as JSON: Locust writes its CSV once a second, and not again at the end.
    """
    locust = tool("locust")
    if locust is None:
        pytest.skip("Locust is not installed (extra `load`)")
    command = [locust, "-f", "loadtest/locustfile.py", "--headless", "--host", url]
    command += ["--csv", str(folder / "run"), "--html", str(folder / "run.html")]
    command += ["--report", str(folder / "stages.json"), "--json-file", str(folder / "rows")]
    result = run(*command, "--time-scale", "0.05", *options)
    output = result.stdout + result.stderr
    found = json.loads((folder / "rows.json").read_text())
    rows = {f"{row['method']} {row['name']}": row for row in found}
    assert (folder / "run_stats.csv").stat().st_size > 0
    assert (folder / "run.html").stat().st_size > 0
    return result.returncode, rows, output


def failures(rows: dict[str, dict[str, Any]]) -> int:
    return sum(int(row["num_failures"]) for row in rows.values())


def mean(row: dict[str, Any]) -> float:
    return float(row["total_response_time"] / row["num_requests"])


@pytest.mark.parametrize("url", ["answer"], indirect=True)
def test_what_people_feel_has_events_of_its_own(url: str, tmp_path: Path) -> None:
    status, rows, output = run_locust(url, tmp_path)
    assert status == 0, output
    streams = rows["POST /generate (stream)"]["num_requests"]
    whole = rows["POST /generate"]["num_requests"]
    assert streams > 0
    assert whole > 0
    # A run that is cut off by its end may leave its last stream half read.
    assert abs(rows["TTFT first token"]["num_requests"] - streams) <= 2
    assert abs(rows["ITL inter-token"]["num_requests"] - 2 * streams) <= 4
    assert mean(rows["TOKENS per request"]) == 3
    assert mean(rows["SPEED per request"]) == SPEED
    assert "0 failed" in output


@pytest.mark.parametrize("url", ["fail", "cut"], indirect=True)
def test_a_failure_shows_in_the_exit_status(url: str, tmp_path: Path) -> None:
    status, rows, output = run_locust(url, tmp_path)
    assert status == 1, output
    assert failures(rows) > 0


@pytest.mark.parametrize("url", ["answer"], indirect=True)
def test_an_open_loop_does_not_wait_for_answers(url: str, tmp_path: Path) -> None:
    status, rows, output = run_locust(
        url, tmp_path, "--shape", "arrivals", "--rate-scale", "4", "--time-scale", "0.02"
    )
    assert status == 0, output
    assert rows["POST /generate (stream)"]["num_requests"] > 0


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "stages.json").read_text())
    return found


@pytest.mark.parametrize("url", ["shed"], indirect=True)
def test_shed_load_is_no_failure_and_the_report_counts_what_locust_counts(
    url: str, tmp_path: Path
) -> None:
    status, rows, output = run_locust(url, tmp_path)
    assert status == failures(rows) == 0, output
    whole = report(tmp_path)["whole"]
    assert whole["shed"] == rows["SHED 429"]["num_requests"] > 0
    answered = [row["num_requests"] for name, row in rows.items() if name.startswith("POST")]
    assert abs(whole["answered"] - sum(answered)) <= 2  # cut off by the end
    assert whole["tokens"] == 3 * whole["answered"]
    assert whole["failed"] == 0
    with (tmp_path / "stages.csv").open() as lines:
        (row,) = csv.DictReader(lines)
    assert float(row["answered"]) == whole["answered"]
    assert f"{whole['answered']} answered" in output


@pytest.mark.parametrize("url", ["answer"], indirect=True)
def test_a_missed_gate_shows_in_the_exit_status(url: str, tmp_path: Path) -> None:
    status, _, output = run_locust(url, tmp_path, "--gate", "latency_p95=0")
    assert status == 2, output
    assert "MISSED" in output
    assert report(tmp_path)["gates"] == {"failed_share": True, "latency_p95": False}


@pytest.mark.parametrize("url", ["answer"], indirect=True)
def test_processes_add_up(url: str, tmp_path: Path) -> None:
    status, rows, output = run_locust(url, tmp_path, "--processes", "2", "--time-scale", "0.1")
    assert status == 0, output
    whole = report(tmp_path)["whole"]
    counted = sum(row["num_requests"] for name, row in rows.items() if "TOKENS" in name)
    assert whole["answered"] == counted > 0


@pytest.mark.parametrize("url", ["answer"], indirect=True)
@pytest.mark.parametrize("api", ["openai", "chat"])
def test_openais_ways_are_asked_too(url: str, api: str, tmp_path: Path) -> None:
    status, rows, output = run_locust(url, tmp_path, "--api", api)
    assert status == 0, output
    assert mean(rows["TOKENS per request"]) == 3
    assert mean(rows["SPEED per request"]) == SPEED
    (streams,) = (
        row["num_requests"] for name, row in rows.items() if name.endswith("completions (stream)")
    )
    assert streams > 0
    assert abs(rows["TTFT first token"]["num_requests"] - streams) <= 2
    assert abs(rows["ITL inter-token"]["num_requests"] - streams) <= 2  # one step after the first


@pytest.mark.parametrize("chat", [True, False])
def test_questions_are_asked_of_chat_models(chat: bool, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (StandIn,), {"chat": chat, "asked": asked})
    with listening(handler) as port:
        status, _, output = run_locust(f"http://127.0.0.1:{port}", tmp_path)
    assert status == 0, output
    assert {"system" in body for body in asked} == ({True, False} if chat else {False})


def test_nobody_answering_is_a_failure(tmp_path: Path) -> None:
    status, _, output = run_locust("http://127.0.0.1:9", tmp_path)
    assert status == 1, output


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_ends(name: str) -> None:
    stages = SHAPES[name]
    total = sum(stage.seconds for stage in stages)
    assert total <= 900
    assert stage_at(stages, 0) == 0
    assert stage_at(stages, total - 0.01) == len(stages) - 1
    assert stage_at(stages, total) is None


def test_every_shape_has_its_mark_on_the_dashboards() -> None:
    assert {*SHAPES, "other"} == set(LOAD_SHAPES)


def test_stages_follow_each_other() -> None:
    stages = (Stage(10, 1), Stage(5, 8))
    found = [stage_at(stages, second) for second in (0, 9, 10, 14, 15)]
    assert found == [0, 0, 1, 1, None]


def test_prompts_are_many_different_and_of_every_category() -> None:
    lines = (ROOT / "loadtest" / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line) for line in lines]
    assert {prompt["category"] for prompt in prompts} == {
        "code",
        "structured",
        "extractive",
        "creative",
        "chat",
    }
    assert len([prompt for prompt in prompts if prompt["category"] == "chat"]) >= 60
    assert len({prompt["prompt"] for prompt in prompts}) == len(prompts) >= 60
    held_out = (ROOT / "api" / "models" / "demo" / "heldout.jsonl").read_text().splitlines()
    unseen = {json.loads(line)["prompt"] for line in held_out}
    assert {p["prompt"] for p in prompts if p["category"] == "code"} <= unseen
