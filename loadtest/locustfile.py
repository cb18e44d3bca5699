"""Loads the API as its users do, and measures what they feel.

Beside Locust's own row for each request there are events of their own:

    TTFT    first token     from sending the request to the first token of a stream
    ITL     inter-token     time between a stream's tokens; a step that brings n tokens counts n
                            times an n-th of its time
    TOKENS  per request     a count, not milliseconds: tokens that one request generated
    SHED    429             requests that the server turned away because its queue was full

Shed load is what an overloaded server should do, so it is counted apart and is no failure. The
exit status is 1 if anything failed, or if nothing succeeded.
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

from shapes import SHAPES, stage_at

PROMPTS = [
    json.loads(line) for line in Path(__file__).with_name("prompts.jsonl").read_text().splitlines()
]
CATEGORIES = sorted({prompt["category"] for prompt in PROMPTS})
REQUEST_TIMEOUT = 330  # a little more than the API's own deadline: it should be the one to say no
MAX_RETRY_AFTER = 10.0  # a closed-loop user does not wait longer, whatever the server asks for
ARRIVALS_PER_SECOND = 0.5  # of one open-loop user
MAX_IN_FLIGHT = 64  # of one open-loop user


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    """Add what this load test can be told."""
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="smoke", env_var="LOAD_SHAPE", help="load shape"
    )
    parser.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        env_var="LOAD_TIME_SCALE",
        help="factor on the length of every stage",
    )
    parser.add_argument(
        "--category",
        choices=["all", *CATEGORIES],
        default="all",
        env_var="LOAD_CATEGORY",
        help="kind of prompts",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        env_var="LOAD_MAX_NEW_TOKENS",
        help="tokens that each request asks for",
    )
    parser.add_argument(
        "--drafter",
        choices=["", "draft", "ngram", "none"],
        default="",
        env_var="LOAD_DRAFTER",
        help="where guesses come from; empty: the server's default",
    )


class Shape(LoadTestShape):
    """Plays the stages of the shape that was chosen."""

    def tick(self) -> tuple[int, float, list[type[HttpUser]]] | None:
        """Locust asks every second: how many users, how fast, of which class?"""
        assert self.runner is not None  # noqa: S101 - Locust sets it before the first tick
        options = self.runner.environment.parsed_options
        stage = stage_at(SHAPES[options.shape], self.get_run_time() / options.time_scale)
        if stage is None:
            return None
        return stage.users, stage.users, [OpenLoopUser if stage.open_loop else ClosedLoopUser]


class ApiUser(HttpUser):
    """Knows how to send both kinds of request and how to report them."""

    abstract = True

    def on_start(self) -> None:
        """Say in every request that this is a load test: dashboards mark the time of one."""
        self.client.headers["X-Load-Test"] = self.environment.parsed_options.shape

    def body(self, **fields: Any) -> dict[str, Any]:
        """A request for a random prompt of the chosen category."""
        options = self.environment.parsed_options
        prompts = [p for p in PROMPTS if options.category in {"all", p["category"]}]
        prompt = random.choice(prompts)
        drafter = {"drafter": options.drafter} if options.drafter else {}
        return {
            "prompt": prompt["prompt"],
            "max_new_tokens": options.max_new_tokens,
            **drafter,
            **fields,
        }

    def plain(self) -> float:
        """Send one request for a whole answer. Returns the seconds to wait before the next."""
        with self.client.post(
            "/generate", json=self.body(), timeout=REQUEST_TIMEOUT, catch_response=True
        ) as response:
            if response.status_code == 429:
                return shed(response)
            if response.ok:
                self.report("TOKENS", "per request", response.json()["generated_tokens"])
        return 0.0

    def stream(self) -> float:
        """Send one streaming request, timed token by token. Returns the seconds to wait."""
        start = time.perf_counter()
        with self.client.post(
            "/generate",
            name="/generate (stream)",
            json=self.body(stream=True),
            timeout=REQUEST_TIMEOUT,
            stream=True,
            catch_response=True,
        ) as response:
            if response.status_code == 429:
                return shed(response)
            if response.ok:
                try:
                    self.follow(response, start)
                except (OSError, ValueError) as error:  # requests' errors are OSErrors
                    response.failure(f"broken stream: {type(error).__name__}")
                # Locust stopped its clock at the headers; the request ended just now.
                response.request_meta["response_time"] = (time.perf_counter() - start) * 1000
        return 0.0

    def follow(self, response: ResponseContextManager, start: float) -> None:
        """Read a stream to its end and report its first token, its gaps and its tokens."""
        previous = start
        tokens = 0
        complete = False
        for data in stream_events(response):
            now = time.perf_counter()
            if "error" in data:
                response.failure(f"error in the stream: {data['error'].get('code')}")
                return
            if "finish_reason" in data:
                self.report("TOKENS", "per request", data["generated_tokens"])
                complete = True
                continue
            count = len(data["tokens"])
            if tokens == 0:
                self.report("TTFT", "first token", (now - start) * 1000)
            else:
                for _ in range(count):
                    self.report("ITL", "inter-token", (now - previous) * 1000 / count)
            tokens += count
            previous = now
        if not complete:
            response.failure("the stream ended without its last event")

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


def shed(response: ResponseContextManager) -> float:
    """Count a 429 apart from requests and failures. Returns the seconds it asks to wait."""
    response.request_meta["request_type"] = "SHED"
    response.request_meta["name"] = "429"
    response.success()
    return min(float(response.headers.get("Retry-After") or 1), MAX_RETRY_AFTER)


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
    """Sends requests at random times, whether or not earlier ones have been answered."""

    def wait_time(self) -> float:
        """Exponential gaps: arrivals of independent people are a Poisson process."""
        return random.expovariate(ARRIVALS_PER_SECOND)

    def on_start(self) -> None:
        """Begin with nothing in flight."""
        super().on_start()
        self.in_flight = Group()

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


@events.quitting.add_listener
def judge(environment: Environment, **_: Any) -> None:
    """Print the run in one line and set the exit status."""
    entries = list(environment.stats.entries.values())
    requests = [entry for entry in entries if entry.method == "POST"]
    failed = sum(entry.num_failures for entry in requests)
    succeeded = sum(entry.num_requests for entry in requests) - failed
    shed_load = sum(entry.num_requests for entry in entries if entry.method == "SHED")
    tokens = sum(entry.total_response_time for entry in entries if entry.method == "TOKENS")
    seconds = max(environment.stats.total.last_request_timestamp or 0, 0) - (
        environment.stats.total.start_time
    )
    rate = tokens / seconds if seconds > 0 else 0.0
    print(
        f"\n{succeeded} answered, {shed_load} shed (429), {failed} failed; "
        f"{tokens:.0f} tokens, {rate:.1f} per second"
    )
    environment.process_exit_code = 1 if failed or not succeeded else 0
