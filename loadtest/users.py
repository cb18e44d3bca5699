"""Locust's users: they send requests, for whole answers or streams, and record latencies.

A closed-loop user waits for each answer. An open-loop user sends requests at random times, whether
or not earlier ones have been answered. Locust only counts requests; the recorder has all other
figures.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from email.utils import parsedate_to_datetime
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import gevent
import requests
from gevent.event import Event as Signal
from gevent.lock import BoundedSemaphore
from gevent.pool import Group
from locust import HttpUser, constant, tag, task
from locust.clients import ResponseContextManager
from locust.env import Environment
from locust.event import EventHook
from locust.exception import StopUser

import options as load_options
import slo
from access import Access
from editor_trace import Event, trace
from prefill import PassCosts
from protocols import INFILL, INFILL_FIELDS, PROTOCOLS, Ask, stream_events
from record import Recorder, Reply, Tally, token_gaps
from shapes import TRACE, arrivals
from texts import Frame, rough
from workload import Conversation, Server, Workload, share

# Seconds; a little more than the API's own deadline, so that the API ends a late request.
REQUEST_TIMEOUT = 330
MAX_RETRY_AFTER = 10.0  # maximum wait of a closed-loop user, whatever the server asks for
SOURCES = {
    path.name: path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))
}
MAX_IN_FLIGHT = 64  # concurrent requests of one open-loop user
# No answer (errors of `requests` are OSErrors), or one that violates the protocol.
UNANSWERED = (OSError, LookupError, TypeError, ValueError)
_MODELS = "/v1/models"
REFUSED, CANCELLED = ": refused (429)", ": cancelled"  # suffixes of Locust's rows


def served_model(host: str | None, access: Access) -> dict[str, Any]:
    """The served model: its `id`, and the other fields that the API reports.

    Raises:
        ValueError: nothing answers there, or not this API; the message is one line.
    """
    url, setting = f"{host}{_MODELS}", "--host or TARGET_URL"
    try:
        answer = requests.get(url, headers=access.header(host), timeout=10)
    except requests.RequestException as error:
        raise ValueError(
            f"nothing answers at {host} ({type(error).__name__}): start the stack with `make up`, "
            f"or set the API's address with {setting}"
        ) from None
    if answer.status_code == requests.codes.unauthorized:
        raise ValueError(f"{host} asks for a key: {access.advice(str(host))}")
    try:
        answer.raise_for_status()
        model = answer.json()["data"][0]
        return {**model, "id": str(model["id"])}
    except UNANSWERED:
        text = " ".join(answer.text.split())[:100]
        raise ValueError(
            f"{url} should list models, but answered {answer.status_code} {answer.reason}: {text!r}"
            f" (is this the API's address? {setting} sets it)"
        ) from None


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds to wait before the next request, from a number or a date (RFC 9110, 10.2.3)."""
    given = headers.get("Retry-After", "")
    if given.isdecimal():
        return float(given)
    try:
        return max(0.0, parsedate_to_datetime(given).timestamp() - time.time())
    except ValueError:
        return 1.0


class Run:
    """One process's part of a run: what it sends, and what it records.

    Args:
        environment: Locust's environment.
        recorder: records the results.
        index: number of this process.
        workers: ids of all processes of the run.
    """

    def __init__(
        self, environment: Environment, recorder: Recorder, index: int, workers: Sequence[str]
    ) -> None:
        self.recorder = recorder
        self.options = environment.parsed_options
        self.number = self.options.load_number  # of the run
        self.lost = 0  # number of workers that no longer answer
        self.host, self.access = str(environment.host), environment.access
        self.limits = slo.goodput_limits(self.options.goodput)
        self.index, self.processes = index, len(workers)
        self.workers = {*workers}  # those that have something left to send
        self.numbers = count()  # of users
        most = self.options.max_concurrency
        self.slot = (
            BoundedSemaphore(max(1, share(most, index, len(workers)))) if most else nullcontext()
        )
        self.model = ""
        self.costs: PassCosts | None = None
        self.opened = 0.0  # arrival of the first user of an open loop
        self.open = 0  # number of open conversations
        self.times = arrivals(
            recorder.stages, self.options.burstiness, self.options.load_seed, index, len(workers)
        )
        self.started = recorder.started
        self.workload: Workload | None = None

    def prepare(self) -> None:
        """Ask the API about its model, and prepare the requests.

        Raises:
            UNANSWERED: the API does not answer, refuses, or violates the protocol.
        """
        served = served_model(self.host, self.access)
        self.model = served["id"]
        headers = self.access.header(self.host)
        metrics = requests.get(f"{self.host}/metrics", headers=headers, timeout=10)
        self.costs = PassCosts.read(metrics.text)
        server = Server(
            self._encode,
            chat=bool(served.get("chat", True)),
            context=served.get("max_model_len") or inf,
            answer=served.get("max_tokens") or inf,
            frame=self._frame(),
        )
        self.workload = Workload(
            self.options,
            server,
            load_options.dataset(self.options),
            seed=self.options.load_seed,
            index=self.index,
            processes=self.processes,
        )

    def seconds_alone(self, reply: Reply) -> float | None:
        """Seconds that an answer's prompt would take alone; None if the API does not say enough."""
        if self.costs is None or reply.cached_tokens is None:
            return None
        known = reply.cached_tokens
        return self.costs.alone(reply.input_tokens - known, known)

    @property
    def finished(self) -> bool:
        """Whether the whole file has been sent, and all requests have ended."""
        if self.workload is None:  # a master has none; its workers report when they have finished
            return not self.workers
        return self.workload.exhausted and not self.open

    def due(self, conversation: Conversation) -> float:
        """The start time of a conversation in an open loop, by `time.time()`.

        Raises:
            StopUser: this process has no arrivals.
        """
        if load_options.shape(self.options) == TRACE:
            return self.opened + (conversation.at or 0.0) / self.options.trace_speed
        due = next((at for at in self.times if self.started + at >= self.opened), None)
        if due is None:
            raise StopUser
        return self.started + due

    def _frame(self) -> Frame:
        """Count the tokens that the chat template adds; 0 if the API does not say."""

        def tokens(*roles: str) -> int:
            messages = [{"role": role, "content": "x"} for role in roles]
            answer = self._post("/apply-template", {"messages": messages})
            return len(self._encode(answer.json()["prompt"])) - len(roles) if answer.ok else 0

        question = tokens("user")
        system, turn = tokens("system", "user"), tokens("user", "assistant", "user")
        return Frame(question, max(0, system - question), max(0, turn - question))

    def _post(self, path: str, body: dict[str, Any]) -> requests.Response:
        headers = self.access.header(self.host)
        return requests.post(f"{self.host}{path}", headers=headers, json=body, timeout=60)

    def _encode(self, text: str) -> list[bytes]:
        """Tokenize a text with the API or, if it cannot, roughly."""
        answer = self._post("/tokenize", {"content": text, "with_pieces": True})
        if not answer.ok:
            return rough(text)
        pieces = [token["piece"] for token in answer.json()["tokens"]]
        return [piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces]


class ApiUser(HttpUser):
    """Holds conversations with one protocol, and records each request."""

    abstract = True

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.leaving = Signal()

    def on_start(self) -> None:
        """Start. A header names the load test, so that dashboards can mark its time."""
        self.load: Run = self.environment.load
        options = self.load.options
        self.client.headers["X-Load-Test"] = load_options.shape(options)
        self.client.headers.update(self.load.access.header(self.host))
        self.client.request_event = EventHook()
        self.client.request_event.add_listener(self.report)
        self.protocol = PROTOCOLS[options.protocol]
        self.rng = random.Random(f"{options.load_seed}:{self.load.index}:{next(self.load.numbers)}")

    def stop(self, force: bool = False) -> bool:
        """Stop sending, and wait for pending answers."""
        self.leaving.set()
        return bool(super().stop(force))

    def report(self, request_type: str, name: str, **figures: Any) -> None:
        """Report a finished request to Locust.

        Refused and cancelled requests have no answer's time, so they get a separate row and no
        part in Locust's totals and charts.
        """
        if name.endswith((REFUSED, CANCELLED)):
            row = self.environment.stats.get(name, request_type)
            row.log(figures["response_time"], figures["response_length"])
        else:
            self.environment.events.request.fire(request_type=request_type, name=name, **figures)

    def report_cancelled(self, sent: float) -> None:
        """Count a cancelled request; `sent` is its time of sending by `time.time()`."""
        self.report(
            request_type="POST",
            name=f"{self.protocol.path}{CANCELLED}",
            response_time=(time.time() - sent) * 1000,
            response_length=0,
        )
        self.load.recorder.at(sent).end("cancelled")

    def workload(self) -> Workload | None:
        """The workload; None while the API does not report its model."""
        if self.load.workload is None:
            started = time.perf_counter()
            try:
                self.load.prepare()
            except UNANSWERED as error:
                self.environment.events.request.fire(
                    request_type="GET",
                    name=_MODELS,
                    response_time=(time.perf_counter() - started) * 1000,
                    response_length=0,
                    exception=error,
                    context={},
                )
                self.load.recorder.at(time.time()).end("failed")
                self.leaving.wait(1)
        return self.load.workload

    def next_conversation(self) -> Conversation | None:
        """The next conversation; None while the API does not report its model.

        Raises:
            StopUser: the run has sent all its requests.
        """
        if (workload := self.workload()) is None:
            return None
        if not workload.claim() or (conversation := workload.conversation()) is None:
            raise StopUser
        self.load.open += 1
        return conversation

    def converse(self, conversation: Conversation, *, stream: bool) -> None:
        """Send a conversation's requests one after the other; the first is already claimed."""
        try:
            self._converse(conversation, stream=stream)
        finally:
            self.load.open -= 1

    def _converse(self, conversation: Conversation, *, stream: bool) -> None:
        assert self.load.workload is not None  # noqa: S101 - it made the conversation
        said = [*conversation.history]
        for turn, text in enumerate(conversation.turns):
            if self.leaving.wait(conversation.pauses[turn]):
                return
            if turn and not self.load.workload.claim():
                return
            ask = Ask(
                model=self.load.model,
                turns=(*said, text),
                system=conversation.system,
                tokens=conversation.tokens[turn],
                stream=stream,
                drafter=self.load.options.drafter.replace("default", ""),
                ignore_eos=self.load.options.ignore_eos,
            )
            with self.load.slot:
                sent = time.time()
                self.load.recorder.note(tally := self.load.recorder.at(sent), ask.digest)
                tally.cut += conversation.cut
                try:
                    reply, wait = self.send(self.protocol.body(ask), stream=ask.stream)
                except gevent.GreenletExit:  # the run has ended without waiting for the answer
                    self.report_cancelled(sent)
                    raise
            if self.leaving.wait(wait) or reply is None:
                return
            said += [text, reply.text]

    def send(
        self, body: dict[str, Any], *, stream: bool, kind: str = ""
    ) -> tuple[Reply | None, float]:
        """Send one request; return its answer, if any, and seconds to wait before the next.

        Args:
            body: the body.
            stream: whether the answer is a stream.
            kind: name of a separate row in Locust's table; the report counts such a request only if
                it fails.
        """
        path, problem, reply = self.protocol.path, "", None
        sent, start = time.time(), time.perf_counter()
        # Called at the end of the request: the recorder may have been cleared meanwhile.
        at = (lambda _: Tally()) if kind else self.load.recorder.at
        kind = "stream" if stream else kind
        with self.client.post(
            path,
            name=f"{path} ({kind})" if kind else path,
            json=body,
            timeout=REQUEST_TIMEOUT,
            stream=stream,
            catch_response=True,
        ) as response:
            if response.status_code == requests.codes.too_many_requests:
                # An overloaded server should refuse: this is neither a failure nor an answer.
                response.request_meta["name"] = f"{path}{REFUSED}"
                response.success()
                at(sent).end("refused")
                return None, min(retry_after(response.headers), MAX_RETRY_AFTER)
            try:
                if response.error is not None:
                    problem = f"{type(response.error).__name__}: no answer"
                elif not response.ok:
                    problem = f"status {response.status_code}: {response.text[:200]}"
                elif stream:
                    reply = self.follow(response, start)
                else:
                    reply = self.protocol.answer(response.json())
            except UNANSWERED as error:
                problem = f"broken answer: {type(error).__name__}: {error}"
            if stream and response.error is None:
                # Locust stopped its clock at the headers.
                response.request_meta["response_time"] = (time.perf_counter() - start) * 1000
            if reply is None:
                response.failure(problem)
                self.load.recorder.at(sent).end("failed")
                return None, 0.0 if response.status_code else 1.0  # no retries in a tight loop
            latency, alone = time.perf_counter() - start, self.load.seconds_alone(reply)
            at(sent).count(replace(reply, latency=latency, alone=alone), self.load.limits)
        return reply, 0.0

    def counted_lines(self, response: ResponseContextManager) -> Iterator[bytes]:
        """Yield a stream's lines, and add up the response length, which Locust does not know."""
        for line in response.iter_lines(chunk_size=None):
            response.request_meta["response_length"] += len(line) + 1
            yield line

    def follow(self, response: ResponseContextManager, start: float) -> Reply:
        """Read a stream to its end; `start` is the time of sending by `time.perf_counter()`.

        Raises:
            ValueError: the stream reports an error or ends too early.
        """
        chunks: list[tuple[float, int | None, int]] = []
        text: list[str] = []
        whole = None
        for event in stream_events(self.counted_lines(response)):
            now = time.perf_counter()
            progress = self.protocol.read(event)
            if progress.error is not None:
                raise ValueError(f"the stream says {progress.error}")
            if progress.text or progress.tokens:
                chunks.append((now, progress.tokens, len(progress.text)))
                text.append(progress.text)
            whole = progress.whole or whole
        if whole is None:
            raise ValueError("the stream ended without its last event")
        return replace(
            whole,
            text="".join(text),
            first=chunks[0][0] - start if chunks else None,
            gaps=token_gaps(chunks, whole.output_tokens),
        )


class PresentUser(ApiUser):
    """A user that counts as one of the stage's users."""

    abstract = True
    wait_time = constant(0)

    def on_start(self) -> None:
        """Start."""
        super().on_start()
        self.load.recorder.count_users(+1)

    def on_stop(self) -> None:
        """Leave."""
        self.load.recorder.count_users(-1)


class ClosedLoopUser(PresentUser):
    """Waits for each answer before it asks again."""

    @tag("plain")
    @task
    def ask(self) -> None:
        """Ask for whole answers."""
        if conversation := self.next_conversation():
            self.converse(conversation, stream=False)

    @tag("stream")
    @task
    def listen(self) -> None:
        """Ask for streams."""
        if conversation := self.next_conversation():
            self.converse(conversation, stream=True)


class OpenLoopUser(ApiUser):
    """Starts some of its process's arrivals, whether or not earlier ones are answered."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Start."""
        super().on_start()
        self.in_flight = Group()
        self.load.opened = self.load.opened or time.time()

    def on_stop(self) -> None:
        """Wait for the last answers, and cancel those that the run does not wait for."""
        try:
            self.in_flight.join()
        finally:
            self.in_flight.kill()

    @tag("stream")
    @task
    def arrive(self) -> None:
        """Start a streaming conversation when it is due, without waiting for it."""
        if (conversation := self.next_conversation()) is None:
            return
        if self.leaving.wait(max(0.0, self.load.due(conversation) - time.time())):
            self.load.open -= 1
        elif len(self.in_flight) >= MAX_IN_FLIGHT:
            self.load.recorder.at(time.time()).unsent += 1  # planned load that was not sent
            self.load.open -= 1
        else:
            self.in_flight.spawn(self.converse, conversation, stream=True)


class EditorUser(PresentUser):
    """Types: requests a suggestion at every key, which cancels a pending one."""

    def on_start(self) -> None:
        """Start to type."""
        super().on_start()
        self.protocol = INFILL
        self.events = trace(SOURCES, inf, self.rng.getrandbits(32))
        self.begun = time.perf_counter()
        self.waiting: gevent.Greenlet | None = None
        self.in_flight = Group()

    def on_stop(self) -> None:
        """Close the editor."""
        self.cancel()
        self.in_flight.join()
        super().on_stop()

    @task
    def press(self) -> None:
        """Press a key when it is due."""
        if (workload := self.workload()) is None:
            return
        event = next(self.events)
        due = self.begun + event.at * self.load.options.time_scale
        if self.leaving.wait(max(0.0, due - time.perf_counter())):
            return
        if event.kind == "warm":
            body = event.body | INFILL_FIELDS
            self.in_flight.spawn(self.send, body, stream=False, kind="reading ahead")
            return
        if not workload.claim():
            raise StopUser
        self.cancel()
        self.asked = time.time()
        self.waiting = self.in_flight.spawn(self.suggest, event)

    def suggest(self, event: Event) -> None:
        """Request a suggestion."""
        body = event.body | INFILL_FIELDS
        if self.load.options.answer_tokens:
            body["n_predict"] = self.load.options.answer_tokens
        with self.load.slot:
            self.send(body, stream=False)

    def cancel(self) -> None:
        """Close the connection of a pending suggestion."""
        if self.waiting is None or self.waiting.dead:
            return
        self.waiting.kill()
        if not isinstance(self.waiting.value, gevent.GreenletExit):
            return  # the answer has just come
        self.report_cancelled(self.asked)
