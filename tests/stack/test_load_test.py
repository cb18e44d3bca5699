"""The load test on a stand-in API: what it counts, and its exit status."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.loopback import HOST, Handler, listening
from tests.stack.support import run, tool

SPEED = 42.0  # tokens per second that each answer claims
ANSWER = {"generated_text": "abc", "generated_tokens": 3, "finish_reason": "length"}
ANSWER |= {"tokens_per_second": SPEED}
STEPS = (
    {"text": "a", "tokens": [{"id": 1, "text": "a", "origin": "target"}]},
    {"text": "bc", "tokens": [{"id": n, "text": "b", "origin": "draft"} for n in (2, 3)]},
)


@dataclass
class StandIn:
    """An API of which every third request is odd.

    Attributes:
        odd: what the odd request gets: "answer", "shed", "fail" or "cut".
        chat: whether the model is a chat model.
        asked: the bodies of all requests.
    """

    odd: str = "answer"
    chat: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)

    def handler(self) -> type[Handler]:
        api, numbers = self, count(1)

        class Answers(Handler):
            def do_POST(self) -> None:
                body = self.body()
                assert body.get("prompt") or body["messages"][0]["content"]
                api.asked.append(body)
                odd = api.odd if next(numbers) % 3 == 0 else "answer"
                if odd == "shed":
                    self.reply(429, {}, {"Retry-After": "0"})
                elif odd == "fail":
                    self.reply(500, {})
                elif self.path.startswith("/v1/"):
                    self.reply_as_openai(body)
                elif body.get("stream"):
                    self.stream([*STEPS] if odd == "cut" else [*STEPS, ANSWER])
                else:
                    self.reply(200, ANSWER)

            def do_GET(self) -> None:
                assert self.path == "/v1/models"
                self.reply(200, {"data": [{"id": "it", "chat": api.chat}]})

            def reply_as_openai(self, body: dict[str, Any]) -> None:
                chat = "chat" in self.path
                assert body["model"] == "it"
                assert ("messages" in body) == chat
                usage = {"usage": {"completion_tokens": 3}, "choices": []}
                usage |= {"timings": {"predicted_per_second": SPEED}}
                if not body.get("stream"):
                    self.reply(200, usage)
                    return
                deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "bc"}]
                choices = [{"delta": d} if chat else {"text": d["content"]} for d in deltas]
                self.stream([*({"choices": [one], "usage": None} for one in choices), usage])

            def stream(self, events: list[Any]) -> None:
                text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
                content = f"{text}data: [DONE]\n\n".encode()
                self.reply(200, content, {"Content-Type": "text/event-stream"})

        return Answers


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a stand-in; the parameter says what its odd requests get."""
    with listening(StandIn(getattr(request, "param", "answer")).handler()) as port:
        yield f"http://{HOST}:{port}"


@dataclass
class Run:
    """A load test that has ended: its exit status, Locust's rows, its own report, its output."""

    status: int
    rows: dict[str, dict[str, Any]]
    report: dict[str, Any]
    output: str

    def mean(self, name: str) -> float:
        return float(self.rows[name]["total_response_time"] / self.rows[name]["num_requests"])

    def number(self, name: str) -> int:
        return int(self.rows[name]["num_requests"])

    def failures(self) -> int:
        return sum(int(row["num_failures"]) for row in self.rows.values())


def run_locust(url: str, folder: Path, *options: str) -> Run:
    """Run a short load test.

    The rows are read as JSON: Locust writes its CSV once a second, and not again at the end.
    """
    locust = tool("locust")
    if locust is None:
        pytest.skip("Locust is not installed (extra `load`)")
    command = [locust, "-f", "loadtest/locustfile.py", "--headless", "--host", url]
    command += ["--csv", str(folder / "run"), "--html", str(folder / "run.html")]
    command += ["--report", str(folder / "stages.json"), "--json-file", str(folder / "rows")]
    result = run(*command, "--time-scale", "0.05", *options)
    rows = json.loads((folder / "rows.json").read_text())
    assert (folder / "run_stats.csv").stat().st_size > 0
    assert (folder / "run.html").stat().st_size > 0
    return Run(
        result.returncode,
        {f"{row['method']} {row['name']}": row for row in rows},
        json.loads((folder / "stages.json").read_text()),
        result.stdout + result.stderr,
    )


@pytest.mark.parametrize("api", ["", "openai", "chat"])
def test_tokens_and_times_between_them_have_events_of_their_own(
    url: str, tmp_path: Path, api: str
) -> None:
    found = run_locust(url, tmp_path, *(("--api", api) if api else ()))
    assert found.status == 0, found.output
    (streams,) = (found.number(name) for name in found.rows if name.endswith("(stream)"))
    assert streams > 0
    # At the end of the run the last stream may be half read.
    assert abs(found.number("TTFT first token") - streams) <= 2
    later = 1 if api else 2  # after the first: `bc`, which is one piece or two tokens
    assert abs(found.number("ITL inter-token") - later * streams) <= 4
    assert found.mean("TOKENS per request") == 3
    assert found.mean("SPEED per request") == SPEED
    assert "0 failed" in found.output


@pytest.mark.parametrize("url", ["fail", "cut"], indirect=True)
def test_a_failure_shows_in_the_exit_status(url: str, tmp_path: Path) -> None:
    found = run_locust(url, tmp_path)
    assert found.status == 1, found.output
    assert found.failures() > 0


def test_an_api_that_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    assert run_locust("http://127.0.0.1:9", tmp_path).status == 1


@pytest.mark.parametrize("url", ["shed"], indirect=True)
def test_shed_load_is_no_failure_and_the_report_counts_what_locust_counts(
    url: str, tmp_path: Path
) -> None:
    found = run_locust(url, tmp_path)
    assert found.status == found.failures() == 0, found.output
    whole = found.report["whole"]
    assert whole["shed"] == found.number("SHED 429") > 0
    answered = [found.number(name) for name in found.rows if name.startswith("POST")]
    assert abs(whole["answered"] - sum(answered)) <= 2  # the end of the run cuts them off
    assert whole["tokens"] == 3 * whole["answered"]
    assert whole["failed"] == 0
    with (tmp_path / "stages.csv").open() as lines:
        (row,) = csv.DictReader(lines)
    assert float(row["answered"]) == whole["answered"]
    assert f"{whole['answered']} answered" in found.output


def test_a_missed_gate_shows_in_the_exit_status(url: str, tmp_path: Path) -> None:
    found = run_locust(url, tmp_path, "--gate", "latency_p95=0")
    assert found.status == 2, found.output
    assert "MISSED" in found.output
    assert found.report["gates"] == {"failed_share": True, "latency_p95": False}


@pytest.mark.parametrize(
    "options",
    [
        ("--processes", "2", "--time-scale", "0.1"),
        ("--shape", "arrivals", "--rate-scale", "4", "--time-scale", "0.02"),
    ],
    ids=["processes", "open loop"],
)
def test_processes_and_an_open_loop_are_counted_alike(
    url: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    found = run_locust(url, tmp_path, *options)
    assert found.status == 0, found.output
    assert abs(found.report["whole"]["answered"] - found.number("TOKENS per request")) <= 2
    assert found.report["whole"]["answered"] > 0


@pytest.mark.parametrize("chat", [True, False])
def test_only_chat_models_are_asked_questions(chat: bool, tmp_path: Path) -> None:
    api = StandIn(chat=chat)
    with listening(api.handler()) as port:
        found = run_locust(f"http://{HOST}:{port}", tmp_path)
    assert found.status == 0, found.output
    assert {"system" in body for body in api.asked} == ({True, False} if chat else {False})
