"""Locust's users: they send requests, whole or as streams, and report what a client feels.

A closed-loop user waits for each answer. An open-loop user sends requests at random times, whether
or not earlier ones have been answered.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import HttpUser, constant, tag, task
from locust.clients import ResponseContextManager

from protocols import CHAT, PROTOCOLS, Prompt
from record import Tally

PROMPTS = [
    Prompt(row["category"], row["prompt"])
    for row in map(
        json.loads, Path(__file__).with_name("prompts.jsonl").read_text("utf-8").splitlines()
    )
]
CATEGORIES = sorted({prompt.category for prompt in PROMPTS})
# Seconds; a little more than the API's own deadline, so that the API ends a late request.
REQUEST_TIMEOUT = 330
MAX_RETRY_AFTER = 10.0  # a closed-loop user waits no longer, whatever the server asks for
MAX_IN_FLIGHT = 64  # requests of one open-loop user
# Lengths of answers where none is given: half of them are shorter than the median, and most are
# within a factor of two of it, as lengths of texts are.
MEDIAN_TOKENS, SIGMA, SHORTEST, LONGEST = 48, 0.6, 8, 256


def credentials(keys: str) -> dict[str, str]:
    """The header with the first key of `KEY,NAME:KEY`, as in SPECOPS_API_KEYS; none without one."""
    name, colon, key = keys.partition(",")[0].strip().partition(":")
    key = key if colon else name
    return {"Authorization": f"Bearer {key}"} if key else {}


class ApiUser(HttpUser):
    """Sends requests and streams by one protocol, and reports each."""

    abstract = True

    def on_start(self) -> None:
        """Choose prompts. A header names the load test, so that dashboards can mark its time."""
        options = self.environment.parsed_options
        self.client.headers["X-Load-Test"] = options.shape
        self.client.headers.update(credentials(options.api_key))
        self.protocol = PROTOCOLS[options.api]
        served = self.client.get("/v1/models").json()["data"][0]
        self.model = served["id"]
        wanted = {options.category}
        if options.category == "all":
            wanted = set(CATEGORIES) if served["chat"] else {*CATEGORIES} - {CHAT}
        self.prompts = [prompt for prompt in PROMPTS if prompt.category in wanted]

    def tally(self, sent: float) -> Tally:
        """The tally in which a request that was sent at that time counts."""
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
        """Read a stream to its end and report its times. Returns what went wrong, if anything."""
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
        """Count a request whose answer has just become complete."""
        self.report("TOKENS", "per request", tokens)
        tally = self.tally(sent)
        tally.answered += 1
        tally.tokens += tokens
        tally.latency.append(time.perf_counter() - start)
        tally.last = time.time()

    def shed(self, response: ResponseContextManager, sent: float) -> float:
        """Count a 429 apart from requests and failures. Returns the seconds to wait."""
        response.request_meta["request_type"] = "SHED"
        response.request_meta["name"] = "429"
        response.success()
        self.tally(sent).shed += 1
        return min(float(response.headers.get("Retry-After") or 1), MAX_RETRY_AFTER)

    def report(self, kind: str, name: str, value: float) -> None:
        """Fire an event that is not a request; `value` takes the place of milliseconds."""
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=value,
            response_length=0,
            exception=None,
            context={},
        )


def stream_events(response: ResponseContextManager) -> Iterator[dict[str, Any]]:
    """Yield the JSON body of each server-sent event of a stream, when it comes."""
    for line in response.iter_lines(chunk_size=None):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])


class ClosedLoopUser(ApiUser):
    """Waits for each answer before it asks again."""

    wait_time = constant(0)

    @tag("plain")
    @task
    def ask(self) -> None:
        """Ask for a whole answer."""
        gevent.sleep(self.plain())

    @tag("stream")
    @task
    def listen(self) -> None:
        """Ask for a stream."""
        gevent.sleep(self.stream())


class OpenLoopUser(ApiUser):
    """Sends one request a second on average, whether or not earlier ones have been answered."""

    def wait_time(self) -> float:
        """Exponential gaps: requests of independent people arrive as a Poisson process."""
        return random.expovariate(self.environment.parsed_options.rate_scale)

    def on_start(self) -> None:
        """Begin at a random time."""
        super().on_start()
        self.in_flight = Group()
        gevent.sleep(self.wait_time())

    def on_stop(self) -> None:
        """Wait for the last answers; each request has a time limit."""
        self.in_flight.join()

    @tag("stream")
    @task
    def arrive(self) -> None:
        """Send a request for a stream and do not wait for it."""
        if len(self.in_flight) < MAX_IN_FLIGHT:
            self.in_flight.spawn(self.stream)
        else:
            self.report("SHED", "not sent: too many in flight", 0)
            self.tally(time.time()).failed += 1  # this load was asked for and not made
