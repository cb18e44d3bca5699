"""OpenTelemetry traces, which show what each request waited for; off by default.

With `OTEL_EXPORTER_OTLP_ENDPOINT`, each generating request is a span. Below it are spans for its
time in the queue, its prompt and its decoding, with the times that the engine measured. The SDK
reads the other `OTEL_` variables. Spans have figures and names, never a word of a prompt or answer.
Only this module knows OpenTelemetry, whose packages are the extra `otel`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from specops.request import FinishReason, GenerationRequest, GenerationStats
from specops.system.failures import SparseWarnings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN = "http/protobuf"
_FLUSH_SECONDS = 2.0  # for sending the last spans at the end, whether a collector answers or not
_ENDED = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)
log = logging.getLogger(__name__)


class RequestTrace:
    """The spans of one HTTP request. Used on the event loop.

    Args:
        tracer: starts the spans below the request's.
        span: the request's span.
        context: makes new spans children of the request's.
        clock_offset: nanoseconds since 1970 when `time.monotonic()` was 0.
    """

    def __init__(self, tracer: Tracer, span: Span, context: Context, clock_offset: int) -> None:
        self._tracer, self._span, self._context = tracer, span, context
        self._clock_offset = clock_offset
        self._requests: list[GenerationRequest] = []
        self._finished: list[tuple[FinishReason, GenerationStats]] = []
        self._open = 1  # the HTTP request itself, and its requests in the engine
        self._ends = 0
        self._attributes: dict[str, AttributeValue] = {}  # set when the span ends
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def submitted(self, request: GenerationRequest) -> None:
        """Expect the end of a request of the engine: each prompt and each choice is one."""
        self._open += 1
        self._requests.append(request)

    def finished(
        self, request: GenerationRequest, reason: FinishReason, stats: GenerationStats | None
    ) -> None:
        """Record a request's times in the engine; without statistics, only its end."""
        self._finished.append((reason, stats or GenerationStats()))
        if stats is not None:
            self._record_parts(request, reason, stats)
        self._close()

    def _record_parts(
        self, request: GenerationRequest, reason: FinishReason, stats: GenerationStats
    ) -> None:
        queue = self._at(request.arrival)
        prompt = self._at(request.arrival + stats.queue_seconds)
        decode = self._at(request.arrival + stats.queue_seconds + stats.prefill_seconds)
        end = decode + round(stats.decode_seconds * 1e9)
        self._record("queue", queue, prompt, {})
        if stats.prefill_seconds > 0:  # it got a slot
            self._record("prompt", prompt, decode, _input_tokens([stats]))
        if stats.generated_tokens:
            attributes: dict[str, AttributeValue] = {
                "gen_ai.usage.output_tokens": stats.generated_tokens,
                "gen_ai.response.finish_reasons": (reason.value,),
                "specops.passes": stats.sequence_steps,
                "specops.draft_tokens": stats.draft_tokens,
                "specops.accepted_tokens": stats.accepted_tokens,
                "specops.tokens_per_pass": stats.tokens_per_pass,
                "specops.preemptions": stats.preemptions,
            }
            self._record("decode", decode, end, attributes)

    def _record(
        self, name: str, start: int, end: int, attributes: Mapping[str, AttributeValue]
    ) -> None:
        span = self._tracer.start_span(name, self._context, attributes=attributes, start_time=start)
        span.end(end)

    def answered(self, status: int) -> None:
        """Record the answer to the HTTP request, whose span ends now."""
        self._ends = self._at(time.monotonic())
        self._attributes["http.response.status_code"] = status
        if status >= 500:
            self._fail(str(status))
        self._close()

    def _at(self, seconds: float) -> int:
        return self._clock_offset + round(seconds * 1e9)

    def _fail(self, error: str) -> None:
        from opentelemetry.trace import StatusCode  # noqa: PLC0415

        self._span.set_status(StatusCode.ERROR)
        self._attributes["error.type"] = error

    def _close(self) -> None:
        """End the HTTP request's span once nothing can be added to it."""
        self._open -= 1
        if self._open:
            return
        reasons = [reason for reason, _ in self._finished]
        for reason in reasons:
            if reason not in _ENDED:  # an answer that began with 200 may fail later
                self._fail(reason.value)
        if self._requests:
            stats = [stats for _, stats in self._finished]
            self._attributes |= _request_attributes(self._requests)
            self._attributes |= _input_tokens(stats)
            self._attributes |= {
                "gen_ai.usage.output_tokens": sum(one.generated_tokens for one in stats),
                "gen_ai.response.finish_reasons": tuple(reason.value for reason in reasons),
            }
        self._span.set_attributes(self._attributes)
        self._span.end(self._ends)


def _input_tokens(stats: Sequence[GenerationStats]) -> dict[str, AttributeValue]:
    return {
        "gen_ai.usage.input_tokens": sum(one.prompt_tokens for one in stats),
        "gen_ai.usage.cache_read.input_tokens": sum(one.cached_prompt_tokens for one in stats),
    }


def _request_attributes(requests: Sequence[GenerationRequest]) -> dict[str, AttributeValue]:
    """Return the options that differ from their defaults, as each attribute takes time.

    Stop strings are left out: they are the client's text.
    """
    request, sampling = requests[0], requests[0].sampling
    if request.embed:
        return {}
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.max_tokens": request.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.stream": request.stream,
        "specops.drafter": request.drafter,
    }
    seldom = {
        "gen_ai.request.choice.count": (len(requests), 1),
        "gen_ai.request.top_p": (sampling.top_p, 1.0),
        "gen_ai.request.top_k": (sampling.top_k, 0),
        "gen_ai.request.presence_penalty": (sampling.presence_penalty, 0.0),
        "gen_ai.request.frequency_penalty": (sampling.frequency_penalty, 0.0),
        "gen_ai.request.seed": (sampling.seed, None),
    }
    for name, (value, usual) in seldom.items():
        if value is not None and value != usual:
            attributes[name] = value
    return attributes


class Tracing:
    """Starts the traces of requests, and sends their spans from a background thread.

    It drops spans that the collector does not accept in time: no request waits for them.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        self._server, self._within = SpanKind.SERVER, set_span_in_context
        self._provider = provider
        self._tracer = provider.get_tracer("specops", version("specops"))
        self._extract = TraceContextTextMapPropagator().extract

    def begin(
        self, headers: Mapping[str, str], arrival: float, attributes: Mapping[str, str]
    ) -> RequestTrace | None:
        """Begin the trace of a request, or continue the client's (`traceparent`).

        Args:
            headers: the request's headers.
            arrival: when it arrived, by `time.monotonic()`.
            attributes: attributes of its span, including `gen_ai.operation.name` and
                `gen_ai.request.model`.

        Returns:
            The trace; None if this request is not sampled.
        """
        offset = time.time_ns() - round(time.monotonic() * 1e9)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}",
            self._extract(headers),
            self._server,
            attributes,
            start_time=offset + round(arrival * 1e9),
        )
        if not span.get_span_context().trace_flags.sampled:
            return None
        return RequestTrace(self._tracer, span, self._within(span), offset)

    def shut_down(self) -> None:
        """Send the last spans, within a moment even if the collector does not answer."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(_FLUSH_SECONDS)


def tracing_from_env(environ: Mapping[str, str]) -> Tracing | None:
    """Set up tracing as the `OTEL_` variables say; return None if it is off.

    A problem is logged and leaves tracing off: such variables are often set for a whole machine,
    and a service without traces is better than none.
    """
    endpoint = next((environ[name] for name in ENDPOINTS if environ.get(name)), "")
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint or disabled or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _SPOKEN)
    if protocol != _SPOKEN:
        log.warning(
            "no traces: they can be sent only as %s, not as %s. Set %s=%s and the collector's port "
            "for it, usually 4318",
            *(_SPOKEN, protocol, _PROTOCOLS[1], _SPOKEN),
        )
        return None
    try:
        tracing = Tracing(_provider())
    except ImportError:
        log.warning(
            "no traces: OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed: "
            "in a clone, `pip install -e '.[otel]'` adds it"
        )
        return None
    except Exception as error:  # for a value that the SDK cannot use
        log.warning("no traces: OpenTelemetry cannot start: %s", error)
        return None
    log.info("traces are sent", extra={"fields": {"to": urlsplit(endpoint).hostname}})
    return tracing


def _provider() -> TracerProvider:
    """Set up the SDK as its variables say."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    _quieten()
    for name in [name for name, value in os.environ.items() if name.startswith("OTEL_")]:
        if not os.environ[name]:
            del os.environ[name]  # Compose passes empty ones, which parts of the SDK misread
    own: dict[str, AttributeValue] = {
        "service.name": "specops",
        "service.version": version("specops"),
    }
    resource = Resource.create(own | dict(OTELResourceDetector().detect().attributes))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _quieten() -> None:
    """Log each of the SDK's warnings once a minute, not at every failed attempt."""
    sparse = SparseWarnings()
    for name in tuple(logging.Logger.manager.loggerDict):
        if name.startswith("opentelemetry."):
            logging.getLogger(name).filters = [sparse]
