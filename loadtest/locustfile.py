"""Loads the API as its users do, and measures what they feel.

Beside Locust's own row for each request there are events of their own:

    TTFT    first token     from sending the request to the first token of a stream
    ITL     inter-token     time between a stream's tokens; a step that brings n tokens counts n
                            times an n-th of its time
    TOKENS  per request     a count, not milliseconds: tokens that one request generated
    SPEED   per request     a rate, not milliseconds: tokens after the first, per second, by the
                            server's clock; several steps may reach a busy client at once
    SHED    429             requests that the server turned away because its queue was full

Shed load is what an overloaded server should do, so it is counted apart and is no failure. The
exit status is 1 if anything failed or nothing succeeded, 2 if a gate of `slo.py` is missed.
"""

from __future__ import annotations

import json
import random
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import HttpUser, LoadTestShape, constant, events, tag, task
from locust.clients import ResponseContextManager
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

import slo
from protocols import CHAT, PROTOCOLS, Prompt
from record import Recorder, Tally, write
from shapes import SHAPES, stage_at

PROMPTS = [
    Prompt(row["category"], row["prompt"])
    for row in map(json.loads, Path(__file__).with_name("prompts.jsonl").read_text().splitlines())
]
CATEGORIES = sorted({prompt.category for prompt in PROMPTS})
REQUEST_TIMEOUT = 330  # a little more than the API's own deadline: it should be the one to say no
MAX_RETRY_AFTER = 10.0  # a closed-loop user does not wait longer, whatever the server asks for
MAX_IN_FLIGHT = 64  # of one open-loop user
# Answers' lengths where none is given: half of them are shorter than the first, and most are
# within a factor of two, as lengths of texts are.
MEDIAN_TOKENS, SIGMA, SHORTEST, LONGEST = 48, 0.6, 8, 256


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    """Add what this load test can be told."""
    option = parser.add_argument
    option("--shape", choices=sorted(SHAPES), default="smoke", env_var="LOAD_SHAPE", help="shape")
    option("--time-scale", type=float, default=1.0, env_var="LOAD_TIME_SCALE", help="on stages")
    option("--rate-scale", type=float, default=1.0, env_var="LOAD_RATE_SCALE", help="on arrivals")
    option("--api", choices=sorted(PROTOCOLS), default="generate", env_var="LOAD_API", help="API")
    option(
        "--category",
        choices=["all", *CATEGORIES],
        default="all",
        env_var="LOAD_CATEGORY",
        help="kind of prompt; all: every one, questions only if the server has a chat model",
    )
    option(
        "--max-new-tokens",
        type=int,
        default=0,
        env_var="LOAD_MAX_NEW_TOKENS",
        help="tokens that each request asks for; 0: drawn for each, as texts' lengths are",
    )
    option(
        "--drafter",
        choices=["", "draft", "suffix", "head", "cascade", "none"],
        default="",
        env_var="LOAD_DRAFTER",
        help="where guesses come from; empty: the server's default, none: plain decoding",
    )
    for name, what in (("--gate", "for the exit status"), ("--objective", "that define the knee")):
        option(name, action="append", default=[], metavar="NAME=LIMIT", help=f"limits {what}")
    option("--report", default="", env_var="LOAD_REPORT", help="JSON file for the stages' figures")


class Shape(LoadTestShape):
    """Plays the stages of the shape that was chosen."""

    def tick(self) -> tuple[int, float, list[type[HttpUser]]] | None:
        """Locust asks every second: how many users, how fast, of which class?"""
        assert self.runner is not None  # noqa: S101 - Locust sets it before the first tick
        options = self.runner.environment.parsed_options
        stages = SHAPES[options.shape]
        place = stage_at(stages, self.get_run_time() / options.time_scale)
        if place is None:
            return None
        stage = stages[place]
        return stage.users, stage.users, [OpenLoopUser if stage.open_loop else ClosedLoopUser]


# -- what is recorded ------------------------------------------------------------------------------


@events.test_start.add_listener
def begin(environment: Environment, **_: Any) -> None:
    """Start to record; every process does, at nearly the same time."""
    options = environment.parsed_options
    environment.recorder = Recorder(SHAPES[options.shape], options.time_scale, time.time())


@events.report_to_master.add_listener
def hand_over(client_id: str, data: dict[str, Any], **_: Any) -> None:
    """A worker sends what it has seen since it last did."""
    if _workers:
        data["stages"] = _workers[0].recorder.take()


@events.worker_report.add_listener
def take_over(client_id: str, data: dict[str, Any], **_: Any) -> None:
    """The master adds it up."""
    if _masters and "stages" in data:
        _masters[0].recorder.add(data["stages"])


_workers: list[Environment] = []
_masters: list[Environment] = []


@events.init.add_listener
def know_the_role(environment: Environment, **_: Any) -> None:
    """Remember the environment: the events between processes come without it."""
    if isinstance(environment.runner, WorkerRunner):
        _workers.append(environment)
    elif isinstance(environment.runner, MasterRunner):
        _masters.append(environment)


# -- users -----------------------------------------------------------------------------------------


class ApiUser(HttpUser):
    """Knows how to send both kinds of request and how to report them."""

    abstract = True

    def on_start(self) -> None:
        """Say in every request that this is a load test: dashboards mark the time of one."""
        options = self.environment.parsed_options
        self.client.headers["X-Load-Test"] = options.shape
        self.protocol = PROTOCOLS[options.api]
        served = self.client.get("/v1/models").json()["data"][0]
        self.model = served["id"]
        wanted = {options.category}
        if options.category == "all":
            wanted = set(CATEGORIES) if served["chat"] else {*CATEGORIES} - {CHAT}
        self.prompts = [prompt for prompt in PROMPTS if prompt.category in wanted]

    def tally(self, sent: float) -> Tally:
        """Where a request that was sent then is counted."""
        tally: Tally = self.environment.recorder.at(sent)
        return tally

    def body(self, *, stream: bool) -> dict[str, Any]:
        """A request for a random prompt of the chosen category."""
        options = self.environment.parsed_options
        drawn = round(MEDIAN_TOKENS * random.lognormvariate(0, SIGMA))
        tokens = options.max_new_tokens or min(max(drawn, SHORTEST), LONGEST)
        prompt = random.choice(self.prompts)
        return self.protocol.body(prompt, tokens, options.drafter, self.model, stream=stream)

    def plain(self) -> float:
        """Send one request for a whole answer. Returns the seconds to wait before the next."""
        sent, start = time.time(), time.perf_counter()
        with self.client.post(
            self.protocol.path,
            json=self.body(stream=False),
            timeout=REQUEST_TIMEOUT,
            catch_response=True,
        ) as response:
            if response.status_code == 429:
                return self.shed(response, sent)
            if not response.ok:
                self.tally(sent).failed += 1
                return 0.0
            self.answered(sent, start, self.protocol.generated(response.json()))
        return 0.0

    def stream(self) -> float:
        """Send one streaming request, timed token by token. Returns the seconds to wait."""
        sent, start = time.time(), time.perf_counter()
        with self.client.post(
            self.protocol.path,
            name=f"{self.protocol.path} (stream)",
            json=self.body(stream=True),
            timeout=REQUEST_TIMEOUT,
            stream=True,
            catch_response=True,
        ) as response:
            if response.status_code == 429:
                return self.shed(response, sent)
            problem: str | None = f"status {response.status_code}"
            if response.ok:
                try:
                    problem = self.follow(response, sent, start)
                except (OSError, ValueError) as error:  # requests' errors are OSErrors
                    problem = f"broken stream: {type(error).__name__}"
                # Locust stopped its clock at the headers; the request ended just now.
                response.request_meta["response_time"] = (time.perf_counter() - start) * 1000
            if problem:
                response.failure(problem)
                self.tally(sent).failed += 1
        return 0.0

    def follow(self, response: ResponseContextManager, sent: float, start: float) -> str | None:
        """Read a stream to its end and report what it felt like. Returns what went wrong."""
        first = previous = start
        tokens, generated, speed = 0, None, 0.0
        gaps: list[float] = []
        for data in stream_events(response):
            now = time.perf_counter()
            progress = self.protocol.read(data)
            if progress.error is not None:
                return f"error in the stream: {progress.error}"
            if progress.tokens:
                if tokens == 0:
                    first = now
                else:
                    gaps += [(now - previous) / progress.tokens] * progress.tokens
                tokens += progress.tokens
                previous = now
            generated = generated if progress.generated is None else progress.generated
            speed = progress.speed or speed
        if generated is None:
            return "the stream ended without its last event"
        if tokens:
            self.report("TTFT", "first token", (first - start) * 1000)
            self.tally(sent).ttft.append(first - start)
        for gap in gaps:
            self.report("ITL", "inter-token", gap * 1000)
        self.tally(sent).itl.extend(gaps)
        if speed:
            self.report("SPEED", "per request", speed)
        self.answered(sent, start, generated)
        return None

    def answered(self, sent: float, start: float, tokens: int) -> None:
        """Count a request that got its whole answer just now."""
        self.report("TOKENS", "per request", tokens)
        tally = self.tally(sent)
        tally.answered += 1
        tally.tokens += tokens
        tally.latency.append(time.perf_counter() - start)
        tally.last = time.time()

    def shed(self, response: ResponseContextManager, sent: float) -> float:
        """Count a 429 apart from requests and failures. Returns the seconds it asks to wait."""
        response.request_meta["request_type"] = "SHED"
        response.request_meta["name"] = "429"
        response.success()
        self.tally(sent).shed += 1
        return min(float(response.headers.get("Retry-After") or 1), MAX_RETRY_AFTER)

    def report(self, kind: str, name: str, value: float) -> None:
        """Fire an event of our own; `value` takes the place of milliseconds."""
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=value,
            response_length=0,
            exception=None,
            context={},
        )


def stream_events(response: ResponseContextManager) -> Iterator[dict[str, Any]]:
    """The JSON bodies of a stream's server-sent events, each when it comes."""
    for line in response.iter_lines(chunk_size=None):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])


class ClosedLoopUser(ApiUser):
    """Waits for each answer before it asks again."""

    wait_time = constant(0)

    @tag("plain")
    @task
    def ask(self) -> None:
        """One whole answer."""
        gevent.sleep(self.plain())

    @tag("stream")
    @task
    def listen(self) -> None:
        """One stream."""
        gevent.sleep(self.stream())


class OpenLoopUser(ApiUser):
    """One arrival a second on average, whether or not earlier ones have been answered."""

    def wait_time(self) -> float:
        """Exponential gaps: arrivals of independent people are a Poisson process."""
        return random.expovariate(self.environment.parsed_options.rate_scale)

    def on_start(self) -> None:
        """Begin with nothing in flight, at a random time."""
        super().on_start()
        self.in_flight = Group()
        gevent.sleep(self.wait_time())

    def on_stop(self) -> None:
        """Wait for the last answers; each request has its own time limit."""
        self.in_flight.join()

    @tag("stream")
    @task
    def arrive(self) -> None:
        """Send one stream and do not wait for it."""
        if len(self.in_flight) < MAX_IN_FLIGHT:
            self.in_flight.spawn(self.stream)
        else:
            self.report("SHED", "not sent: too many in flight", 0)
            self.tally(time.time()).failed += 1  # the load that was asked for was not made


# -- the end ---------------------------------------------------------------------------------------


@events.quitting.add_listener
def judge(environment: Environment, **_: Any) -> None:
    """Print the run in a few lines, write the report and set the exit status."""
    if isinstance(environment.runner, WorkerRunner) or not hasattr(environment, "recorder"):
        return
    options, recorder = environment.parsed_options, environment.recorder
    whole, stages = recorder.whole(), recorder.rows(options.rate_scale)
    gates = slo.judge(whole, slo.limits(slo.GATES, options.gate))
    objectives = slo.limits(slo.OBJECTIVES, options.objective)
    best = slo.knee(stages, objectives) if SHAPES[options.shape][0].open_loop else None
    if options.report:
        report = {
            "shape": options.shape,
            "host": environment.host,
            "drafter": options.drafter or "the server's default",
            "api": options.api,
            "category": options.category,
            "objectives": objectives,
            "gates": {verdict.name: verdict.good for verdict in gates},
            "whole": whole,
            "stages": stages,
            "knee": best,
        }
        write(Path(options.report), report)
    print(
        f"\n{whole['answered']} answered, {whole['shed']} shed (429), {whole['failed']} failed; "
        f"{whole['tokens']} tokens, {whole['tokens_per_second']:.1f} per second"
    )
    for verdict in gates:
        print(f"gate: {verdict}")
    if len(stages) > 1 and SHAPES[options.shape][0].open_loop:
        print(f"knee: {best['arrived_per_second']:.1f} per second" if best else "knee: none")
    failed = whole["failed"] or not whole["answered"]
    gates_missed = not all(verdict.good for verdict in gates)
    environment.process_exit_code = 1 if failed else 2 if gates_missed else 0
