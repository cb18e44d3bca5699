"""The load test on a stand-in API: what it counts, and its exit status."""

from __future__ import annotations

import csv
import json
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
        odd: what the odd request gets: "answer", "shed" or "fail". Of the failures, half are an
            error at once, and half are streams that lack their end.
        chat: whether the model is a chat model.
        key: the key that every request must bring; empty: none.
        asked: the bodies of all requests.
    """

    odd: str = "answer"
    chat: bool = False
    key: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def handler(self) -> type[Handler]:
        api, numbers = self, count(1)

        class Answers(Handler):
            def do_POST(self) -> None:
                body = self.body()
                assert not api.key or self.headers["Authorization"] == f"Bearer {api.key}"
                assert body.get("prompt") or body["messages"][0]["content"]
                api.asked.append(body)
                number = next(numbers)
                odd = api.odd if number % 3 == 0 else "answer"
                if odd == "shed":
                    self.reply(429, {}, {"Retry-After": "0"})
                elif odd == "fail" and number % 2:
                    self.reply(500, {})
                elif self.path.startswith("/v1/"):
                    self.reply_as_openai(body)
                elif body.get("stream"):
                    self.stream([*STEPS] if odd == "fail" else [*STEPS, ANSWER])
                else:
                    self.reply(200, ANSWER)

            def do_GET(self) -> None:
                assert self.path == "/v1/models"
                if api.key and self.headers["Authorization"] != f"Bearer {api.key}":
                    self.reply(401, {})
                    return
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


def run_locust(api: StandIn, folder: Path, *options: str) -> Run:
    """Run a short load test of a stand-in."""
    with listening(api.handler()) as port:
        return run_locust_at(f"http://{HOST}:{port}", folder, *options)


def locust_command(url: str) -> list[str]:
    locust = tool("locust")
    if locust is None:
        pytest.skip("Locust is not installed (extra `load`)")
    return [locust, "-f", "loadtest/locustfile.py", "--headless", "--host", url]


def run_locust_at(url: str, folder: Path, *options: str) -> Run:
    """Run a short load test.

    The rows are read as JSON: Locust writes its CSV once a second, and not again at the end.
    """
    command = locust_command(url)
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


@pytest.mark.parametrize(
    ("api", "options"),
    [
        ("generate", ()),
        ("openai", ("--processes", "2", "--time-scale", "0.1")),
        ("chat", ("--shape", "arrivals", "--rate-scale", "4", "--time-scale", "0.02")),
    ],
    ids=["generate", "openai, processes", "chat, open loop"],
)
def test_tokens_and_times_between_them_have_events_of_their_own(
    api: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    stand_in = StandIn(key="first")
    found = run_locust(stand_in, tmp_path, "--api", api, "--api-key", "first,second", *options)
    assert found.status == 0, found.output
    (streams,) = (found.number(name) for name in found.rows if name.endswith("(stream)"))
    assert streams > 0
    # At the end of the run the last stream may be half read.
    assert abs(found.number("TTFT first token") - streams) <= 2
    later = 2 if api == "generate" else 1  # after the first: `bc`: two tokens or one piece
    assert abs(found.number("ITL inter-token") - later * streams) <= 4
    assert found.mean("TOKENS per request") == 3
    assert found.mean("SPEED per request") == SPEED
    assert "0 failed" in found.output
    assert abs(found.report["whole"]["answered"] - found.number("TOKENS per request")) <= 2
    assert found.report["whole"]["answered"] > 0
    told = [message["role"] for body in stand_in.asked for message in body.get("messages", ())]
    assert not any("system" in body for body in stand_in.asked)  # it is no chat model
    assert "system" not in told


def test_a_failure_shows_in_the_exit_status(tmp_path: Path) -> None:
    found = run_locust(StandIn("fail"), tmp_path)
    assert found.status == 1, found.output
    page = (tmp_path / "run.html").read_text()
    for reason in ("500 Server Error", "status 500", "the stream ended without its last event"):
        assert reason in page
    failures = sum(int(row["num_failures"]) for row in found.rows.values())
    assert abs(found.report["whole"]["failed"] - failures) <= 2  # the end of the run cuts them off


def test_an_api_that_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    assert run_locust_at("http://127.0.0.1:9", tmp_path).status == 1


def test_a_refused_key_ends_the_run_at_once() -> None:
    with listening(StandIn(key="first").handler()) as port:
        # Else this would last 300 seconds, longer than `run` waits.
        done = run(*locust_command(f"http://{HOST}:{port}"), "--time-scale", "10")
    assert done.returncode == 1
    assert "--api-key" in done.stderr
    assert "Traceback" not in done.stderr


def test_shed_load_is_no_failure_and_the_report_counts_what_locust_counts(tmp_path: Path) -> None:
    found = run_locust(StandIn("shed"), tmp_path)
    assert found.status == 0, found.output
    assert not any(row["num_failures"] for row in found.rows.values())
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


def test_a_chat_model_is_asked_questions_and_a_missed_gate_shows_in_the_exit_status(
    tmp_path: Path,
) -> None:
    api = StandIn(chat=True)
    found = run_locust(api, tmp_path, "--gate", "latency_p95=0")
    assert {"system" in body for body in api.asked} == {True, False}
    assert found.status == 2, found.output
    assert "MISSED" in found.output
    assert found.report["gates"] == {"failed_share": True, "latency_p95": False}
