"""Builds the application: endpoints, middleware, errors, and the engine's start and stop."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from specops.config import Settings
from specops.engine.engine import PROMPT_ERRORS
from specops.engine.model_info import ModelState
from specops.http import console, documentation, health
from specops.http.errors import (
    CLIENT_CLOSED_REQUEST,
    GENERATING,
    ApiError,
    InvalidField,
    from_http_exception,
    from_validation_error,
    queue_full,
    unavailable,
)
from specops.http.middleware import Endpoints, RequestContext
from specops.http.protocol import Protocol
from specops.http.protocols import PROTOCOLS
from specops.http.security.hosts import Cors, Hosts, cors
from specops.http.security.keys import ApiKeys
from specops.http.state import AppState, Context
from specops.metrics.metrics import Metrics
from specops.request import PromptTooLong
from specops.serving.admission import QueueFull
from specops.serving.async_engine import AsyncEngine, NotReady
from specops.text import template_process
from specops.text.confined_process import ProgramProcessError
from specops.text.cuts import UncutText
from specops.tracing import RequestTrace, Tracing, tracing_from_env

_PROMPTS = PROTOCOLS.prompts


class _Described(FastAPI):
    """An application that describes its key, and not FastAPI's answer to wrong fields."""

    def openapi(self) -> dict[str, Any]:
        """Return the content of `/openapi.json`."""
        if self.openapi_schema is None:
            schema = super().openapi()
            for operations in schema["paths"].values():
                for operation in operations.values():
                    answer = operation["responses"].get("422", {})
                    if "HTTPValidationError" in str(answer):
                        del operation["responses"]["422"]
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            # An empty requirement, too: a server without keys needs none.
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}, {}]
        return super().openapi()


def create_app(
    settings: Settings, service: AsyncEngine | None = None, metrics: Metrics | None = None
) -> FastAPI:
    """Build the application. Its model loads in the background after the start.

    Args:
        settings: the settings.
        service: the engine; by default it is made from the settings.
        metrics: the metrics that `service` updates.
    """
    # Reading a number takes time by the square of its digits: a body of numbers of 4,000 digits
    # took 16 ms. This is the lowest limit that Python accepts; no field needs more than 20.
    sys.set_int_max_str_digits(sys.int_info.str_digits_check_threshold)
    metrics = metrics or Metrics(max_k_draft=settings.max_k_draft, volume=settings.cache_dir)
    metrics.set_queue_size(settings.queue_size)
    service = service or AsyncEngine(settings, metrics)
    tracing = tracing_from_env(os.environ)
    state = AppState(settings, service, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        template_process.SHARED.start()  # now, for the priority of this thread
        service.start()
        yield
        await service.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.shut_down)
        state.executors.shut_down()

    app = _Described(
        title="Spec-Ops",
        version=version("specops"),
        summary="LLM inference for small machines, made fast by speculative decoding",
        lifespan=lifespan,
        docs_url=None,  # see documentation.py
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's host name
        # FastAPI's spans know nothing of the engine, and its log would contain clients' texts.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.specops = state
    # `include_router` would build every route again for each application.
    for part in (*PROTOCOLS, health, console, documentation):
        app.router.routes += part.router.routes
    endpoints = Endpoints(app.routes)
    for path in endpoints.paths:
        failures = (*GENERATING, CLIENT_CLOSED_REQUEST) if path in _PROMPTS else ()
        metrics.set_endpoint(path, (200, *failures))
    keys = ApiKeys(settings.api_keys, settings.metrics_key)
    metrics.set_clients(keys.clients)

    def admit(scope: Scope, whole: bool) -> None:
        if _is_for_engine(scope) and service.state is ModelState.READY:
            if whole:
                Context.of(scope).release = service.admission.reserve()
            else:
                service.admission.check(1)

    app.add_middleware(
        RequestContext,
        state=state,
        keys=keys,
        hosts=Hosts("*" if settings.api_keys else settings.allowed_hosts),
        endpoints=endpoints,
        admit=admit,
        trace=lambda scope, arrival: (
            _begin_trace(tracing, service, metrics, scope, arrival) if tracing else None
        ),
    )
    app.add_middleware(Cors, **cors(settings.allowed_origins))  # around the keys
    _answer_errors(app, metrics)
    return app


def _is_for_engine(scope: Scope) -> bool:
    """Return whether the engine computes the answer to a request."""
    return scope["method"] == "POST" and scope["path"] in _PROMPTS


def _begin_trace(
    tracing: Tracing, service: AsyncEngine, metrics: Metrics, scope: Scope, arrival: float
) -> RequestTrace | None:
    if not _is_for_engine(scope):
        return None
    path = scope["path"]
    attributes = {
        "http.request.method": "POST",
        "http.route": path,
        "gen_ai.operation.name": _PROMPTS[path].operation,
        "gen_ai.provider.name": "specops",
        "gen_ai.request.model": service.info.name if service.info else "not loaded",
    }
    with metrics.failures.report_errors("trace"):
        return tracing.begin(Headers(scope=scope), arrival, attributes)
    return None


def _answer_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answer every exception that can end a request with an error object."""

    async def answer(request: Request, error: Exception) -> Response:
        protocol = Context.of(request.scope).protocol
        if isinstance(error, RequestValidationError | InvalidField):
            metrics.observe_rejected("invalid")
        elif isinstance(error, NotReady) and request.method == "POST":  # GET asks about the service
            metrics.observe_rejected("not_ready")
        return protocol.error_response(_api_error(error, request, protocol))

    for kind in (
        *(RequestValidationError, InvalidField, HTTPException, NotReady, ProgramProcessError),
        *(QueueFull, *PROMPT_ERRORS),
    ):
        app.add_exception_handler(kind, answer)


def _api_error(error: Exception, request: Request, protocol: Protocol) -> ApiError:
    prompt = _PROMPTS.get(request.scope["path"])
    status, code, field = 400, "invalid_value", prompt.field if prompt else ""
    match error:
        case RequestValidationError():
            return from_validation_error(error, request, protocol.invalid_status)
        case HTTPException():
            return from_http_exception(error, request)
        case NotReady():
            return unavailable(error.message, f"model_{error.state}")
        case ProgramProcessError():
            return unavailable(str(error), "template_process")
        case QueueFull():
            return queue_full(error)
        case InvalidField():
            status, code, field = protocol.invalid_status, error.code, error.field
        case UncutText():
            code = "unbroken_text"
    message, more = str(error), {}
    if isinstance(error, PromptTooLong):
        message, code = protocol.too_long(error, field), "context_length_exceeded"
        more = {
            "type": "exceed_context_size_error",  # llama-server's, with two numbers
            "n_prompt_tokens": error.prompt_tokens,
            "n_ctx": error.context,
        }
    return ApiError(status, message, code=code, param=field, more=more)
