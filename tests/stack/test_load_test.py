"""The load test on a stand-in API: what it counts, and its exit status."""

import csv
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean
from threading import Event, Lock, Thread
from typing import Any

import pytest

from tests.loopback import HOST, Handler, free_port, listening
from tests.stack.support import ROOT, run, tool
from tests.waiting import PATIENCE, wait

INPUT = 7  # tokens of each prompt, as the answers claim
ANSWER = {"generated_text": "abc", "generated_tokens": 3, "finish_reason": "length"}
ANSWER |= {"prompt_tokens": INPUT}
SUGGESTION = {"content": "abc", "tokens_evaluated": INPUT, "tokens_predicted": 3}
STEPS = (
    {"text": "a", "tokens": [{"id": 1, "text": "a", "origin": "target"}]},
    {"text": "bc", "tokens": [{"id": n, "text": "b", "origin": "draft"} for n in (2, 3)]},
)


@dataclass
class StandIn:
    """An API of which every third request is odd.

    Attributes:
        odd: what the odd request gets: "answer", "refuse" or "fail". Of the failures, half are an
            error at once, and half are streams that lack their end.
        answers: whether the other requests get an answer.
        chat: whether the model is a chat model.
        key: the key that every request must bring; empty: none.
        seconds: how long an answer takes.
        may: answers wait for it.
        clock: tells the time.
        asked: the bodies of all requests that ask for an answer.
        seen: when each of them came, and what became of it: a value of `odd`.
        open: those that wait for their answers.
        together: at the arrival of each, how many were open.
    """

    odd: str = "answer"
    answers: bool = True
    chat: bool = False
    key: str = ""
    seconds: float = 0.0
    may: Event = field(default_factory=Event)
    clock: Callable[[], float] = time.time
    asked: list[dict[str, Any]] = field(default_factory=list)
    seen: list[tuple[float, str]] = field(default_factory=list)
    open: int = 0
    together: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may.set()
        self.lock = Lock()

    def handler(self) -> type[Handler]:
        api, numbers = self, count(1)

        class Answers(Handler):
            def do_POST(self) -> None:
                body = self.body()
                if self.path in ("/tokenize", "/apply-template"):
                    self.reply(404, {})  # as others' servers
                    return
                assert not api.key or self.headers["Authorization"] == f"Bearer {api.key}"
                if self.path == "/infill":
                    self.suggest(body)
                    return
                assert body.get("prompt") or body["messages"][0]["content"]
                api.asked.append(body)
                number = next(numbers)
                odd = "answer" if api.answers and number % 3 else api.odd
                with api.lock:
                    api.seen.append((api.clock(), odd))
                    api.open += 1
                    api.together.append(api.open)
                time.sleep(api.seconds)
                api.may.wait(PATIENCE)
                with api.lock:
                    api.open -= 1
                if odd == "refuse":
                    waits = "0", "Wed, 21 Oct 2015 07:28:00 GMT"
                    self.reply(429, {}, {"Retry-After": waits[number % 2]})
                elif odd == "fail" and number % 2:
                    self.reply(500, {})
                elif self.path.startswith("/v1/"):
                    self.reply_as_openai(body)
                elif body.get("stream"):
                    self.stream([*STEPS] if odd == "fail" else [*STEPS, ANSWER])
                else:
                    self.reply(200, ANSWER)

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self.reply(404, {})
                    return
                assert self.path == "/v1/models"
                if api.key and self.headers["Authorization"] != f"Bearer {api.key}":
                    self.reply(401, {})
                    return
                self.reply(200, {"data": [{"id": "it", "chat": api.chat}]})

            def suggest(self, body: dict[str, Any]) -> None:
                """Answer every other key; the others' connections are closed meanwhile."""
                api.asked.append(body)
                if body["n_predict"] == 0:
                    self.reply(200, SUGGESTION | {"content": "", "tokens_predicted": 0})
                elif next(numbers) % 2:
                    self.reply(200, SUGGESTION)
                else:
                    self.connection.settimeout(PATIENCE)
                    assert self.rfile.read(1) == b""
                    self.close_connection = True

            def reply_as_openai(self, body: dict[str, Any]) -> None:
                chat = "chat" in self.path
                assert body["model"] == "it"
                assert ("messages" in body) == chat
                usage = {"usage": {"prompt_tokens": INPUT, "completion_tokens": 3}, "choices": []}
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

    def number(self, name: str) -> int:
        return int(self.rows[name]["num_requests"])


def run_locust(api: StandIn, folder: Path, *options: str, before: Sequence[Path] = ()) -> Run:
    """Run a short load test of a stand-in, which then answers whom it has kept waiting."""
    with listening(api.handler()) as port:
        try:
            return run_locust_at(f"http://{HOST}:{port}", folder, *options, before=before)
        finally:
            api.may.set()


def locust_command(url: str, *before: Path) -> list[str]:
    """The command of a load test of an API; files of Python `before` its own run first."""
    locust = tool("locust")
    if locust is None:
        pytest.skip("Locust is not installed (extra `load`)")
    files, port = ",".join(map(str, (*before, "loadtest/locustfile.py"))), str(free_port())
    own = ("--master-bind-host", HOST, "--master-bind-port", port, "--master-port", port)
    return [locust, "-f", files, "--headless", "--host", url, *own]


def run_locust_at(url: str, folder: Path, *options: str, before: Sequence[Path] = ()) -> Run:
    """Run a short load test, which asks the same each time: its seed is given.

    The rows are read as JSON: Locust writes its CSV once a second, and not again at the end.
    """
    command = locust_command(url, *before)
    command += ["--csv", str(folder / "run"), "--html", str(folder / "run.html")]
    command += ["--report", str(folder / "stages.json"), "--json-file", str(folder / "rows")]
    own = ("--time-scale", "0.05", "--stop-timeout", "60", "--seed", "1")
    result = run(*command, *own, *options, timeout=5 * PATIENCE)
    rows = json.loads((folder / "rows.json").read_text())
    assert (folder / "run_stats.csv").stat().st_size > 0
    assert (folder / "run.html").stat().st_size > 0
    return Run(
        result.returncode,
        {f"{row['method']} {row['name']}": row for row in rows},
        json.loads((folder / "stages.json").read_text()),
        result.stdout + result.stderr,
    )


# A run that ends with its last request, however slow the machine is.
COUNTED = ("--num-prompts", "24", "--max-concurrency", "3")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# Locust's master gives a worker up that is silent for three seconds, as on a busy machine.
PATIENT = """
from locust import runners

runners.HEARTBEAT_LIVENESS = 60
"""
# Locust hands a worker the first users as soon as the master knows it: the worker's own constructor
# may not have returned by then, nor `init` been fired. This file makes that sure.
EARLY = f"""{PATIENT}
from gevent.event import Event
from locust import events
from locust.runners import WorkerRunner

begun, connect = Event(), WorkerRunner.connect_to_master

@events.test_start.add_listener
def tell(**_):
    begun.set()

def connect_and_wait(self):
    connect(self)
    begun.wait()

WorkerRunner.connect_to_master = connect_and_wait
"""


def early_workers(folder: Path) -> Path:
    return written(folder / "early.py", EARLY)


# This one makes a run last as long as the test says, in place of a time that a busy machine may not
# keep: as many seconds as the largest number that is the name of a file in a folder.
LASTS = """
import locust, os, sys, time

now = time.time

def lasted(*_):
    return max(map(float, os.listdir({folder!r})), default=0.0)

locust.LoadTestShape.get_run_time = lasted
"""
# And this one has it recorded by the same clock, and tells the users that each worker has.
RECORDED = """
import gevent, pathlib

def told():
    return 2e9 + lasted() if "/loadtest/" in sys._getframe(1).f_code.co_filename else now()

time.time = told

@locust.events.init.add_listener
def tell(environment, **_):
    if isinstance(environment.runner, locust.runners.WorkerRunner):
        gevent.spawn(keep_telling, environment.runner, pathlib.Path({folder!r} + "-users"))

def keep_telling(runner, folder):
    while True:
        whole = folder / f"{{os.getpid()}}.whole"
        whole.write_text(str(runner.user_count))
        whole.rename(folder / str(os.getpid()))
        gevent.sleep(0.1)
"""


class Clock:
    """The seconds that a run has lasted; `file` makes Locust believe it."""

    def __init__(self, folder: Path, text: str = LASTS) -> None:
        self.now, self.folder, self._users = 0.0, folder / "clock", folder / "clock-users"
        self.folder.mkdir()
        self._users.mkdir()
        self.file = written(folder / "lasts.py", text.format(folder=str(self.folder)))

    def set(self, seconds: float) -> None:
        self.now = seconds
        (self.folder / str(seconds)).touch()

    def users(self) -> int:
        """The users that all workers have; they tell it where `RECORDED` is in the file."""
        return sum(int(path.read_text()) for path in self._users.iterdir() if not path.suffix)


def run_until(api: StandIn, folder: Path, requests: int, *options: str) -> Run:
    """Run a load test of early workers, if it has any, until so many requests have come."""
    clock = Clock(folder)

    def watch() -> None:
        try:
            wait("they ask", lambda: len(api.asked) >= requests)
        finally:
            clock.set(3600)

    watcher = Thread(target=watch)
    watcher.start()
    try:
        return run_locust(api, folder, *options, before=[clock.file, early_workers(folder)])
    finally:
        watcher.join()


def check_figures(api: StandIn, report: dict[str, Any]) -> None:
    """Compare a report with what the API saw.

    A request that the run's end cut off may not have reached the API.
    """
    whole = report["whole"]
    ended = sum(whole[name] for name in ("answered", "refused", "failed"))
    assert ended <= len(api.seen) <= ended + whole["cancelled"]
    kinds = [found for _, found in api.seen]
    for name, kind in (("answered", "answer"), ("refused", "refuse"), ("failed", "fail")):
        told = sum(stage[name] for stage in report["stages"])
        assert kinds.count(kind) - whole["cancelled"] <= told == whole[name] <= kinds.count(kind)
    for stage in report["stages"]:
        assert stage["output_tokens"] == 3 * stage["answered"]
        assert stage["input_tokens"] == INPUT * stage["answered"]
        rate = stage["output_tokens_per_second"]
        assert rate * stage["seconds"] == pytest.approx(stage["output_tokens"])
        assert stage["seconds"] >= stage["asking_seconds"]


def test_a_spike_comes_and_leaves_at_once_and_is_counted_by_stage(tmp_path: Path) -> None:
    clock = Clock(tmp_path, LASTS + RECORDED)
    api = StandIn("refuse", clock=lambda: clock.now)
    api.may.clear()

    def play() -> None:
        try:
            wait("two ask", lambda: api.open == 2)
            clock.set(30)
            wait("all ask", lambda: api.open == 60)
            clock.set(60)
            api.may.set()
            wait("two are left", lambda: clock.users() == 2)
        finally:
            clock.set(120)
            api.may.set()

    player = Thread(target=play)
    player.start()
    shape = ("--shape", "spike", "--time-scale", "1", "--processes", "2")
    found = run_locust(api, tmp_path, *shape, before=[clock.file, early_workers(tmp_path)])
    player.join()
    assert found.status == 0, found.output
    check_figures(api, found.report)
    stages = found.report["stages"]
    assert [stage["asked_users"] for stage in stages] == [2, 60, 2]
    assert [stage["users"] for stage in stages] == [2, 60, 2]
    assert (stages[0]["answered"], stages[0]["refused"]) == (2, 0)
    told = stages[1]["answered"], stages[1]["refused"]
    assert told == tuple(api.seen.count((30, kind)) for kind in ("answer", "refuse"))
    assert sum(told) == 58


def test_arrivals_whose_answers_nobody_waits_for_are_counted_too(tmp_path: Path) -> None:
    api = StandIn()
    api.may.clear()
    arrivals = ("--request-rate", "8", "--run-time", "60s", "--stop-timeout", "1")
    found = run_until(api, tmp_path, 8, *arrivals)
    assert found.report["whole"]["cancelled"] >= 8
    check_figures(api, found.report)


@pytest.mark.parametrize(
    ("processes", "seconds"),
    [((), 5.0), (("--processes", "2"), 0.3)],
    ids=["one, and the next stage comes meanwhile", "two processes"],
)
def test_ctrl_c_ends_a_run_with_all_its_figures(
    processes: tuple[str, ...], seconds: float, tmp_path: Path
) -> None:
    api, report = StandIn("refuse", seconds=seconds), tmp_path / "report.json"
    with listening(api.handler()) as port, ExitStack() as stack:
        words = [
            *locust_command(f"http://{HOST}:{port}"),
            "--shape",
            "spike",
            "--time-scale",
            "0.1",
        ]
        words += ["--stop-timeout", "30", "--report", str(report), *processes]
        log = stack.enter_context((tmp_path / "log").open("w"))
        streams = {"stdout": log, "stderr": log}
        process = subprocess.Popen(words, cwd=ROOT, start_new_session=True, **streams)
        stack.callback(process.kill)
        wait("they ask", lambda: len(api.seen) >= 2)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    check_figures(api, figures := json.loads(report.read_text()))
    # None: on a slow machine no user had come by a stage's end.
    assert all((stage["users"] or 0) <= 60 for stage in figures["stages"][:2])


@pytest.mark.parametrize(
    ("api", "options"),
    [
        ("generate", COUNTED),
        ("openai", ("--users", "2", "--run-time", "60s", "--processes", "2")),
        ("chat", ("--shape", "arrivals", "--rate-scale", "4", "--time-scale", "1")),
    ],
    ids=["generate", "openai, processes", "chat, open loop"],
)
def test_locust_counts_requests_and_the_report_has_tokens_and_times(
    api: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    stand_in = StandIn(key="first")
    every = ("--goodput", "e2el:60000")  # however slow the machine is, each answer is good
    options = ("--api", api, "--api-key", "first,second", *every, *options)
    found = run_until(stand_in, tmp_path, 20, *options)
    assert found.status == 0, found.output
    whole = found.report["whole"]
    assert all(name.startswith("POST /") for name in found.rows)
    assert len(stand_in.asked) == sum(map(found.number, found.rows)) == whole["answered"] > 0
    streams = sum(found.number(name) for name in found.rows if name.endswith("(stream)"))
    assert streams == whole["ttft_count"] == whole["tpot_count"] > 0
    assert whole["itl_count"] == 2 * streams  # `bc`: two tokens, told or counted by characters
    check_figures(stand_in, found.report)
    assert (whole["failed"], whole["good_share"]) == (0, 1)
    assert "0 failed" in found.output
    roles = [message["role"] for body in stand_in.asked for message in body.get("messages", ())]
    assert not any("system" in body for body in stand_in.asked)  # it is no chat model
    assert "system" not in roles
    page = (tmp_path / "run.html").read_text()
    assert page.count("TTFT: time to first token") == 1
    assert page.endswith("</html>") or page.rstrip().endswith("</html>")


BREAKS = """
from locust import events
from locust.user import User

start, broken = User.start, []

def start_or_break(self, group):
    if not broken:
        broken.append(True)
        self.on_start = lambda: {}["no such attribute"]
    return start(self, group)

User.start = start_or_break
"""


def test_workers_answers_count_however_long_they_take(tmp_path: Path) -> None:
    api = StandIn(seconds=2)  # Locust's master looks every second, and listens half a second
    users = ("--users", "4", "--spawn-rate", "4", "--run-time", "60s", "--processes", "2")
    found = run_until(api, tmp_path, 4, *users)
    assert found.status == 0, found.output
    whole = found.report["whole"]
    assert len(api.asked) == sum(map(found.number, found.rows)) == whole["answered"] >= 4


def test_a_number_of_requests_ends_the_run_and_its_clock(tmp_path: Path) -> None:
    api = StandIn()
    options = ("--num-prompts", "31", "--max-concurrency", "4", "--seed", "5", "--turns", "2")
    sized = ("--input-len", "150", "--output-len", "9", "--tags", "stream", "--processes", "4")
    found = run_locust(api, tmp_path, *options, *sized, before=[early_workers(tmp_path)])
    assert found.status == 0, found.output
    whole = found.report["whole"]
    assert whole["answered"] == len(api.asked) == 31
    assert {body["max_new_tokens"] for body in api.asked} == {9}
    firsts = [body["prompt"] for body in api.asked if "\n\nabc\n\n" not in body["prompt"]]
    assert 15 <= len(firsts) <= 17  # each process may have half a conversation
    # The stand-in does not count tokens: four characters each, and words are not cut.
    assert mean(map(len, firsts)) == pytest.approx(600, rel=0.05)
    assert whole["answered_per_second"] == pytest.approx(31 / whole["seconds"])


def test_a_failure_shows_in_the_exit_status(tmp_path: Path) -> None:
    found = run_locust(StandIn("fail"), tmp_path, *COUNTED, "--tags", "stream")
    assert found.status == 1, found.output
    assert list(found.rows) == ["POST /generate (stream)"]
    page = (tmp_path / "run.html").read_text()
    for reason in ("status 500", "the stream ended without its last event"):
        assert reason in page
    failures = sum(int(row["num_failures"]) for row in found.rows.values())
    assert found.report["whole"]["failed"] == failures > 0


class SomethingElse(Handler):
    """Not the API."""

    def do_GET(self) -> None:
        self.reply(404, b"no page has\nthis name")


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (None, "nothing answers at http://127.0.0.1:9 (ConnectionError): start the stack"),
        (StandIn(key="first").handler(), "asks for a key: pass it with --api-key or LOAD_API_KEY"),
        (SomethingElse, "/v1/models should list models, but answered 404 Not Found: 'no page has"),
    ],
    ids=["nothing", "a key is missing", "something else"],
)
def test_a_wrong_address_ends_the_run_at_once_and_says_what_answered(
    handler: type[Handler] | None, said: str
) -> None:
    with listening(handler or SomethingElse) as port:
        url = f"http://{HOST}:{port if handler else 9}"
        # Else this would last 300 seconds, longer than `run` waits.
        done = run(*locust_command(url), "--time-scale", "10")
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_refused_requests_have_rows_of_their_own_and_are_no_failures(tmp_path: Path) -> None:
    found = run_locust(StandIn("refuse"), tmp_path, *COUNTED)
    assert found.status == 0, found.output
    assert not any(row["num_failures"] for row in found.rows.values())
    whole = found.report["whole"]
    refused = [name for name in found.rows if name.endswith("refused (429)")]
    assert whole["refused"] == sum(map(found.number, refused)) > 0
    answered = set(found.rows) - set(refused)
    assert whole["answered"] == whole["latency_count"] == sum(map(found.number, answered))
    (locusts,) = re.findall(r"templateArgs = (.*)", (tmp_path / "run.html").read_text())
    total = json.loads(locusts)["requests_statistics"][-1]
    assert (total["name"], total["num_requests"]) == ("Aggregated", whole["answered"])
    assert whole["failed"] == 0
    with (tmp_path / "stages.csv").open() as lines:
        (row,) = csv.DictReader(lines)
    assert float(row["answered"]) == whole["answered"]
    assert f"{whole['answered']} answered" in found.output


def test_a_typist_cancels_what_comes_later_than_the_next_key(tmp_path: Path) -> None:
    api = StandIn(key="first")
    # In its own time: keys that come every few milliseconds leave a slow machine no time to answer.
    typing = ("--category", "editor", "--num-prompts", "24", "--max-concurrency", "4")
    typing += ("--time-scale", "1")
    found = run_locust(api, tmp_path, *typing, "--api-key", "first", "--output-len", "16")
    assert found.status == 0, found.output
    whole = found.report["whole"]
    keys = [body for body in api.asked if body["n_predict"]]
    assert whole["answered"] + whole["cancelled"] == 24
    assert whole["answered"] < len(keys) <= 24  # one may be cancelled before it is sent
    assert found.number("POST /infill") == whole["answered"] == whole["latency_count"] > 0
    assert found.number("POST /infill: cancelled") == whole["cancelled"] > 0
    assert found.number("POST /infill (reading ahead)") == len(api.asked) - len(keys) > 0
    assert {body["n_predict"] for body in keys} == {16}
    assert whole["output_tokens"] == 3 * whole["answered"]
    assert "suggestions were cancelled by the next key" in found.output
    assert (
        "no failure: suggestions were cancelled by the next key"
        in (tmp_path / "run.html").read_text()
    )


def test_a_run_without_an_answer_misses_its_gates_and_says_why(tmp_path: Path) -> None:
    found = run_locust(StandIn("refuse", answers=False), tmp_path, *COUNTED)
    assert found.status == 1, found.output
    assert found.report["whole"]["answered"] == 0 == found.report["whole"]["failed"]
    assert found.report["gates"] == {"failed_share": True, "latency_p95": False}
    refused = found.report["whole"]["refused"]
    reason = f"as nothing was answered: {refused} refused (429)\n"
    assert f"gate: latency_p95 (at most 30): MISSED, {reason}" in found.output
    assert "end to end - / -" in found.output
    with (tmp_path / "stages.csv").open() as lines:
        assert {row["latency_p95"] for row in csv.DictReader(lines)} == {""}
    assert "missed" in (tmp_path / "run.html").read_text().rpartition("Stages and knee")[2]


@pytest.mark.e2e
def test_a_worker_may_join_a_run_but_not_leave_it(tmp_path: Path) -> None:
    api, report = StandIn(seconds=0.05), tmp_path / "report.json"
    with listening(api.handler()) as port, ExitStack() as stack:
        command = locust_command(f"http://{HOST}:{port}")

        def start(name: str, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
            output = stack.enter_context((log := tmp_path / name).open("wb"))
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            process = subprocess.Popen([*command, *options], cwd=ROOT, **streams)
            stack.callback(process.kill)
            return process, log

        limits = ("--users", "4", "--spawn-rate", "4", "--num-prompts", "1000")
        expected = ("--master", "--expect-workers", "2", "--only-summary")
        master, told = start("master", *expected, *limits, "--report", str(report))
        workers = [start(name, "--worker") for name in ("first", "second")]
        wait("both send", lambda: len(api.asked) > 50)
        api.may.clear()  # the requests last until the third is there, however slow the machine is
        workers.append(start("third", "--worker"))
        wait("it has joined", lambda: "3 workers connected" in told.read_text())
        api.may.set()
        so_far = len(api.asked)
        wait("they go on", lambda: len(api.asked) > so_far + 200)
        workers[0][0].terminate()
        assert master.wait(PATIENCE) == 1, told.read_text()
        for worker, _ in workers:
            worker.wait(PATIENCE)
        output = told.read_text()
        assert "workers lost, with a part of the requests and figures: 1" in output
        assert "Traceback" not in output + "".join(log.read_text() for _, log in workers)
    assert 0 < json.loads(report.read_text())["whole"]["answered"] <= len(api.asked) < 1000


def test_users_that_break_show_in_the_exit_status(tmp_path: Path) -> None:
    api = StandIn()
    breaks = written(tmp_path / "breaks.py", BREAKS)
    found = run_locust(api, tmp_path, *COUNTED, before=[breaks])
    assert found.report["whole"]["answered"] == len(api.asked) > 0
    assert found.status == 1, found.output
    assert "errors of the load test itself: 1;" in found.output


def test_a_bad_option_is_refused_before_any_request() -> None:
    """`test_load_report` has all of them."""
    done = run(*locust_command("http://127.0.0.1:9"), "--turns=0")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("locust: ")


def test_a_chat_model_is_asked_questions_and_a_missed_gate_shows_in_the_exit_status(
    tmp_path: Path,
) -> None:
    api = StandIn(chat=True)
    found = run_locust(api, tmp_path, "--gate", "latency_p95=0", *COUNTED)
    assert {bool(body["system"]) for body in api.asked} == {True, False}
    assert found.status == 2, found.output
    assert "MISSED" in found.output
    assert found.report["gates"] == {"failed_share": True, "latency_p95": False}
