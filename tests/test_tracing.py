"""Traces: what a collector gets of each kind of request, and what requests owe to a collector."""

import builtins
import itertools
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest as Export,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from specops.config import Settings
from specops.engine import scheduler
from specops.engine.model_info import ModelState
from specops.metrics.metrics import Metrics
from specops.request import DRAFTERS, FinishReason, GenerationRequest
from specops.serving.async_engine import AsyncEngine
from specops.serving.request_handle import RequestHandle
from specops.text.chat_template import ChatTemplate
from specops.tracing import tracing_from_env
from tests.asgi import AsgiClient
from tests.http.openai_api import Api
from tests.loopback import Handler, listening
from tests.serving.service import halt, share
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio
WORD = "xylophone"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
ENDPOINT, DELAY = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_BSP_SCHEDULE_DELAY"


def traceparent(*, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{PARENT}-{'01' if sampled else '00'}"}


@dataclass
class Collector:
    """What an OTLP receiver got, as its bytes and as its spans by the id of their trace."""

    port: int = 0
    status: int = 200
    refused: int = 0
    may: threading.Event = field(default_factory=threading.Event)  # answer
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def resources(self) -> list[dict[str, Any]]:
        return [
            attributes(group.resource)
            for body in self.bodies
            for group in Export.FromString(body).resource_spans
        ]

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for body in self.bodies
            for group in Export.FromString(body).resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    async def get(self, count: int) -> list[Span]:
        """Wait for so many spans, and see that there are no more."""
        await until(lambda: len(self.spans) >= count)
        assert len(self.spans) == count, [span.name for span in self.spans]
        return self.spans


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that the environment names."""
    made = Collector()
    made.may.set()

    class Receiver(Handler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            made.headers.append({name.lower(): value for name, value in self.headers.items()})
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.may.wait(PATIENCE)
            if made.status == 200:
                made.bodies.append(body)
            else:
                made.refused += 1
            self.reply(made.status, b"")

    with listening(Receiver) as made.port:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{made.port}")
        monkeypatch.setenv(DELAY, "20")
        yield made


def attributes(holder: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(item) for item in value.array_value.values]
        return getattr(value, kind)

    return {item.key: plain(item.value) for item in holder.attributes}


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Api]:
    """The application with a real engine, between its start and its end, as the server has it."""
    metrics = Metrics()
    made = Api(AsyncEngine(settings, metrics, share), settings, metrics)
    async with made.app.router.lifespan_context(made.app), made.client:
        await until(lambda: made.service.state in (ModelState.READY, ModelState.FAILED))
        assert made.service.state is ModelState.READY, made.service.error
        made.service.engine.chat_template = ChatTemplate(TEMPLATE, {})
        yield made


def tree(spans: list[Span]) -> tuple[Span, dict[str, Span]]:
    """The span of the request, and those of its parts by their names; all belong together."""
    ids = {span.span_id: span for span in spans}
    (parent,) = (span for span in spans if span.parent_span_id not in ids)
    parts = {span.name: span for span in spans if span.parent_span_id == parent.span_id}
    assert len(parts) == len(spans) - 1
    assert {span.trace_id for span in spans} == {parent.trace_id}
    return parent, parts


KNOWN = {"POST", "specops", "chat", "text_completion", "embeddings", "none"}
KNOWN |= {*FinishReason, *DRAFTERS}


def says_nothing(here: Api, collector: Collector) -> None:
    """Spans have no text but names that the service itself has: no word of prompts and answers."""
    model = here.service.info.name if here.service.info else ""
    for span in collector.spans:
        assert span.name in {"queue", "prompt", "decode"} | {f"{kind} {model}" for kind in KNOWN}
        assert not span.events
        assert not span.status.message
        values = attributes(span).values()
        texts = {text for one in values for text in (one if isinstance(one, list) else [one])}
        texts = {text for text in texts if isinstance(text, str)}
        assert texts <= KNOWN | {model, *PROTOCOLS, "/v1/embeddings", "500", "504"}
    assert WORD.encode() not in b"".join(collector.bodies)


GENERATE = {"prompt": WORD, "max_new_tokens": 24, "ignore_eos": True, "stop": [f"{WORD}!"]}
CHAT = {"model": "target", "messages": [{"role": "user", "content": WORD}]}
PROTOCOLS: dict[str, tuple[dict[str, Any], str]] = {
    "/generate": (GENERATE, "text_completion"),
    "/v1/completions": ({"model": "target", "prompt": WORD, "max_tokens": 24}, "text_completion"),
    "/v1/chat/completions": (CHAT | {"max_tokens": 24, "seed": 7, "temperature": 2}, "chat"),
    "/v1/messages": (CHAT | {"max_tokens": 24}, "chat"),
    "/v1/responses": ({"model": "target", "input": WORD, "max_output_tokens": 24}, "chat"),
    "/api/chat": (CHAT | {"options": {"num_predict": 24}}, "chat"),
    "/api/generate": (CHAT | {"prompt": WORD, "options": {"num_predict": 24}}, "text_completion"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", PROTOCOLS)
async def test_a_request_is_one_span_with_three_parts_in_the_clients_trace(
    tiny_settings: Settings, collector: Collector, path: str, *, stream: bool
) -> None:
    body, operation = PROTOCOLS[path]
    async with serving(tiny_settings) as here:
        before = time.time_ns()
        response = await here.client.post(
            path, json=body | {"stream": stream}, headers=traceparent()
        )
        assert response.status_code == 200, response.text
        after = time.time_ns()
        spans = await collector.get(4)
    parent, parts = tree(spans)
    assert (parent.trace_id.hex(), parent.parent_span_id.hex()) == (TRACE, PARENT)
    assert parent.kind == Span.SPAN_KIND_SERVER
    model = here.service.info.name if here.service.info else ""
    assert parent.name == f"{operation} {model}"
    assert list(parts) == ["queue", "prompt", "decode"]
    queue, prompt, decode = parts.values()
    # One part begins where the one before it ends; the request spans them all.
    assert before <= parent.start_time_unix_nano == queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prompt.start_time_unix_nano
    assert prompt.start_time_unix_nano < prompt.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano <= parent.end_time_unix_nano <= after
    span, tokens = attributes(parent), attributes(decode)["gen_ai.usage.output_tokens"]
    assert span["http.route"] == path
    assert span["http.response.status_code"] == 200
    assert span["gen_ai.operation.name"] == operation
    assert span["gen_ai.request.model"] == model
    assert span["gen_ai.request.max_tokens"] == 24
    assert span["gen_ai.request.stream"] is stream
    assert span["gen_ai.usage.output_tokens"] == tokens > 0
    assert span["gen_ai.usage.input_tokens"] == attributes(prompt)["gen_ai.usage.input_tokens"] > 0
    assert span["gen_ai.response.finish_reasons"][0] in {"stop", "length"}
    assert parent.status.code == Status.STATUS_CODE_UNSET
    says_nothing(here, collector)


async def test_latencies_are_linked_to_their_traces(
    tiny_settings: Settings, collector: Collector
) -> None:
    """Those that are not sampled to their requests: nobody could find their traces."""

    async def linked(here: Api, **headers: str) -> set[str]:
        """The exemplars on the page after a request."""
        response = await here.client.post("/generate", json=GENERATE, headers=headers)
        assert response.status_code == 200
        openmetrics = {"accept": "application/openmetrics-text; version=1.0.0"}
        page = (await here.client.get("/metrics", headers=openmetrics)).text
        return set(re.findall(r"^(\w+)_bucket.* # {(.*?)}", page, flags=re.MULTILINE))

    latencies = ("specops_latency_seconds", "specops_time_to_first_token_seconds")
    async with serving(tiny_settings) as here:
        traced = await linked(here, **traceparent())
        assert traced == {(name, f'trace_id="{TRACE}"') for name in latencies}
        later = {"x-request-id": "mine", **traceparent(sampled=False)}
        both = await linked(here, **later)
        assert both >= {(name, 'request_id="mine"') for name in latencies}
        await collector.get(4)


async def test_several_choices_have_parts_of_their_own(
    tiny_settings: Settings, collector: Collector
) -> None:
    async with serving(tiny_settings) as here:
        body = {"model": "target", "prompt": [WORD, "b"], "n": 2, "max_tokens": 4, "temperature": 1}
        await here.client.post("/v1/completions", json=body)
        spans = await collector.get(13)
    names = sorted(span.name for span in spans if span.name in {"queue", "prompt", "decode"})
    assert names == ["decode"] * 4 + ["prompt"] * 4 + ["queue"] * 4
    (parent,) = (span for span in spans if not span.parent_span_id)
    assert attributes(parent)["gen_ai.request.choice.count"] == 4


async def test_embeddings_have_no_decoding(tiny_settings: Settings, collector: Collector) -> None:
    async with serving(tiny_settings) as here:
        response = await here.client.post("/v1/embeddings", json={"model": "target", "input": WORD})
        assert response.status_code == 200, response.text
        spans = await collector.get(3)
    parent, parts = tree(spans)
    assert set(parts) == {"queue", "prompt"}
    assert attributes(parent)["gen_ai.operation.name"] == "embeddings"
    says_nothing(here, collector)


@pytest.mark.parametrize(
    ("body", "status"), [({"prompt": WORD, "temperature": -1}, 422), ({"prompt": "a" * 900}, 400)]
)
async def test_a_request_that_never_reached_the_engine_has_no_parts(
    tiny_settings: Settings, collector: Collector, body: dict[str, Any], status: int
) -> None:
    async with serving(tiny_settings) as here:
        response = await here.client.post("/generate", json=body)
        assert response.status_code == status
        (span,) = await collector.get(1)
    assert attributes(span)["http.response.status_code"] == status
    assert span.status.code == Status.STATUS_CODE_UNSET  # the client's fault
    says_nothing(here, collector)


LONG = {"prompt": WORD, "max_new_tokens": 100, "ignore_eos": True, "stream": True}


async def test_a_refused_request_is_a_span_and_a_client_that_left_ends_its_own(
    tiny_settings: Settings, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(tiny_settings, slots=1, queue_size=0)
    async with serving(settings) as here:
        submit, cancelled = here.service.submit, halt(here.service.engine, monkeypatch)

        def observed(*requests: GenerationRequest) -> RequestHandle:
            handle = submit(*requests)
            cancel = handle.cancel
            handle.cancel = lambda: (cancel(), cancelled.set())
            return handle

        monkeypatch.setattr(here.service, "submit", observed)
        running = AsgiClient(here.app, "/generate").send_json(LONG)
        assert (await running.next_event())["tokens"]
        refused = await here.client.post("/generate", json=GENERATE)
        assert refused.status_code == 429
        (span,) = await collector.get(1)
        assert attributes(span)["http.response.status_code"] == 429
        running.leave()
        await running.done
        spans = (await collector.get(5))[1:]
    parent, parts = tree(spans)
    assert set(parts) == {"queue", "prompt", "decode"}
    values = attributes(parent)
    assert values["http.response.status_code"] == 499
    assert values["gen_ai.response.finish_reasons"] == ["cancelled"]
    tokens = attributes(parts["decode"])["gen_ai.usage.output_tokens"]
    assert 0 < values["gen_ai.usage.output_tokens"] == tokens < 100
    assert parent.status.code == Status.STATUS_CODE_UNSET


async def test_a_request_that_passed_its_deadline_in_the_queue_only_waited(
    tiny_settings: Settings, collector: Collector
) -> None:
    settings = replace(tiny_settings, slots=1, request_timeout=1.0)
    async with serving(settings) as here:
        real = here.service.submit

        def late(*requests: GenerationRequest) -> Any:
            return real(*(replace(one, deadline=time.monotonic()) for one in requests))

        here.service.submit = late  # type: ignore[method-assign]
        response = await here.client.post("/generate", json=GENERATE)
        assert response.status_code == 504
        spans = await collector.get(2)
    parent, parts = tree(spans)
    assert set(parts) == {"queue"}
    assert parent.status.code == Status.STATUS_CODE_ERROR
    assert attributes(parent)["error.type"] == "timeout"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_that_fails_says_so(
    tiny_settings: Settings, collector: Collector, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    verify, calls = scheduler.verify, itertools.count()

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls):
            raise RuntimeError(f"after the first token of {WORD}")
        return verify(*arguments, **options)

    async with serving(tiny_settings) as here:
        monkeypatch.setattr(scheduler, "verify", fail)
        body = GENERATE | {"stream": stream, "temperature": 1, "drafter": "none"}
        response = await here.client.post("/generate", json=body)
        spans = await collector.get(4)
    parent, parts = tree(spans)
    assert set(parts) == {"queue", "prompt", "decode"}
    assert parent.status.code == Status.STATUS_CODE_ERROR
    values = attributes(parent)
    assert values["error.type"] == "error"
    assert values["http.response.status_code"] == response.status_code
    says_nothing(here, collector)


async def test_other_endpoints_and_requests_that_are_not_sampled_have_no_span(
    tiny_settings: Settings, collector: Collector
) -> None:
    async with serving(tiny_settings) as here:
        for path in ("/health", "/metrics", "/v1/models", "/generate"):
            await here.client.get(path, headers=traceparent())
        await here.client.post("/tokenize", json={"prompt": WORD}, headers=traceparent())
        for path, (body, _) in PROTOCOLS.items():
            await here.client.post(path, json=body, headers=traceparent(sampled=False))
        await here.client.post("/generate", json=GENERATE)
        parent, _ = tree(await collector.get(4))
    assert not parent.parent_span_id


async def test_the_sdks_own_variables_hold(
    tiny_settings: Settings, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with serving(tiny_settings) as here:
        await here.client.post("/generate", json=GENERATE)
        await here.client.post("/generate", json=GENERATE, headers=traceparent())
        parent, _ = tree(await collector.get(4))
    assert parent.trace_id.hex() == TRACE
    assert {one["service.name"] for one in collector.resources} == {"mine"}
    assert {one["deployment.environment.name"] for one in collector.resources} == {"lab"}
    assert {one["authorization"] for one in collector.headers} == {"Bearer secret"}


async def test_empty_variables_are_no_variables_and_the_service_has_a_name(
    tiny_settings: Settings,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("SERVICE_NAME", "TRACES_SAMPLER", "TRACES_SAMPLER_ARG", "RESOURCE_ATTRIBUTES"):
        monkeypatch.setenv(f"OTEL_{name}", "")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "")
    async with serving(tiny_settings) as here:
        await here.client.post("/generate", json=GENERATE)
    # The end of the service sends what is left.
    assert len(collector.spans) == 4
    assert {one["service.name"] for one in collector.resources} == {"specops"}
    assert not left_out(caplog)


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


async def test_a_collector_that_fails_costs_requests_nothing_and_is_logged_once(
    tiny_settings: Settings, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.status = 400
    async with serving(tiny_settings) as here:
        for number in range(1, 6):
            response = await here.client.post("/generate", json=GENERATE)
            assert response.status_code == 200
            await until(lambda number=number: collector.refused >= number)
        collector.status = 200
        await here.client.post("/generate", json=GENERATE)
        await collector.get(4)
    assert len([line for line in left_out(caplog) if "code: 400" in line]) == 1


async def test_nothing_waits_for_a_collector_that_does_not_answer(
    tiny_settings: Settings, collector: Collector
) -> None:
    collector.may.clear()
    async with serving(tiny_settings) as here:
        for _ in range(4):
            response = await here.client.post("/generate", json=GENERATE)
            assert response.status_code == 200
    (sending,) = (thread for thread in threading.enumerate() if thread.name == "traces")
    collector.may.set()
    sending.join(PATIENCE)  # another test's choice of random numbers would see it try again
    assert not sending.is_alive()


OFF = [
    {},
    {ENDPOINT: ""},
    {ENDPOINT: "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    {ENDPOINT: "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
]


@pytest.mark.parametrize("variables", OFF, ids=str)
def test_it_is_off_unless_it_is_asked_for(
    variables: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert tracing_from_env(variables) is None
    assert not left_out(caplog)


def test_what_prevents_traces_is_logged_and_the_service_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {ENDPOINT: "http://user:secret@127.0.0.1:1"}
    assert tracing_from_env({**environ, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) is None
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry."):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert tracing_from_env(environ) is None
    lines = left_out(caplog)
    for text, word in itertools.zip_longest(lines, ("grpc", "pip install -e '.[otel]'")):
        assert text.startswith("no traces: ")
        assert word in text
    assert "secret" not in caplog.text
