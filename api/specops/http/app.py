"""Builds the application: endpoints, middleware, errors, and the engine's start and stop."""

from __future__ import annotations

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
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from specops.config import Settings
from specops.engine.engine import UnknownToken
from specops.engine.model_info import ModelState
from specops.http import console, documentation, health
from specops.http.endpoints import Endpoints
from specops.http.errors import (
    CLIENT_CLOSED_REQUEST,
    GENERATING,
    ApiError,
    InvalidField,
    from_http_exception,
    from_validation_error,
    unavailable,
)
from specops.http.hosts import Hosts, cors
from specops.http.keys import ApiKeys
from specops.http.middleware import RequestContext
from specops.http.protocols import PROTOCOLS
from specops.http.state import AppState, Context
from specops.metrics.metrics import Metrics
from specops.request import PromptTooLong
from specops.serving.admission import QueueFull
from specops.serving.async_engine import AsyncEngine, NotReady
from specops.text import template_process
from specops.text.template_process import TemplateProcessError
from specops.tracing import RequestTrace, Tracing, tracing_from_env

_PROMPTS = PROTOCOLS.prompts


class _Described(FastAPI):
    """An application that describes its key, and not FastAPI's own answer to wrong fields."""

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
            # An empty requirement, too: a server without keys asks for none.
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}, {}]
        return super().openapi()


def create_app(
    settings: Settings, service: AsyncEngine | None = None, metrics: Metrics | None = None
) -> FastAPI:
    """Build the application. Its model loads in the background after the start.

    Args:
        service: the engine; by default it is made from the settings.
        metrics: the metrics that `service` updates.
    """
    # To read a number takes time by the square of its digits: a body of numbers of 4,000 digits
    # took 16 ms. This is the lowest limit that Python takes, and no field needs more than 20.
    sys.set_int_max_str_digits(sys.int_info.str_digits_check_threshold)
    metrics = metrics or Metrics(max_k_draft=settings.max_k_draft, volume=settings.cache_dir)
    metrics.set_queue_size(settings.queue_size)
    service = service or AsyncEngine(settings, metrics)
    tracing = tracing_from_env(os.environ, metrics.observe_spans)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        template_process.SHARED.start()  # now, for the priority of this thread
        service.start()
        yield
        await service.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.shut_down)

    app = _Described(
        title="Spec-Ops",
        version=version("specops"),
        summary="LLM inference for small machines, made fast by speculative decoding",
        lifespan=lifespan,
        docs_url=None,  # see documentation.py
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the name that the client sent
        # FastAPI's own spans know nothing of the engine, and its log has what clients sent.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    state = app.state.specops = AppState(settings, service, metrics)
    routers = [
        *(protocol.router for protocol in PROTOCOLS),
        *(module.router for module in (health, console, documentation)),
    ]
    endpoints = Endpoints([*app.routes, *(route for router in routers for route in router.routes)])
    for path in endpoints.paths:
        failures = (*GENERATING, CLIENT_CLOSED_REQUEST) if path in _PROMPTS else ()
        metrics.set_endpoint(path, (200, *failures))
    keys = ApiKeys(settings.api_keys, settings.metrics_key)
    metrics.set_clients(keys.clients)
    app.add_middleware(
        RequestContext,
        state=state,
        keys=keys,
        hosts=Hosts("*" if settings.api_keys else settings.allowed_hosts),
        endpoints=endpoints,
        refuse=lambda scope, whole: _refuse_if_full(scope, service, whole),
        trace=lambda scope, arrival: (
            _begin_trace(tracing, service, metrics, scope, arrival) if tracing else None
        ),
    )
    app.add_middleware(CORSMiddleware, **cors(settings.allowed_origins))  # around the keys
    for router in routers:  # `include_router` would build each route anew, for every application
        app.router.routes += router.routes
    _answer_errors(app, metrics)
    return app


def _refuse_if_full(scope: Scope, service: AsyncEngine, whole: bool) -> Response | None:
    """Refuse a request if the queue is full; once it is whole, reserve a slot in the queue."""
    wants_answer = scope["method"] == "POST" and scope["path"] in _PROMPTS
    if not wants_answer or service.state is not ModelState.READY:
        return None
    try:
        if whole:
            Context.of(scope).release = service.admission.reserve()
        else:
            service.admission.check(1)
    except QueueFull as error:
        return Context.of(scope).protocol.error_response(_full(error))
    return None


def _begin_trace(
    tracing: Tracing, service: AsyncEngine, metrics: Metrics, scope: Scope, arrival: float
) -> RequestTrace | None:
    """Follow a request that the engine works for."""
    path = scope["path"]
    if scope["method"] != "POST" or path not in _PROMPTS:
        return None
    attributes = {
        "http.request.method": "POST",
        "http.route": path,
        "gen_ai.operation.name": _PROMPTS[path].operation,
        "gen_ai.provider.name": "specops",
        "gen_ai.request.model": service.info.name if service.info else "not loaded",
    }
    with metrics.failures.contained("trace"):
        return tracing.begin(Headers(scope=scope), arrival, attributes)
    return None


def _full(error: QueueFull) -> ApiError:
    retry = {"retry-after": str(error.retry_after)}
    return ApiError(429, str(error), code=error.reason, headers=retry)


def _answer_errors(app: FastAPI, metrics: Metrics) -> None:
    """Turn every exception that can end a request into an error object."""

    def answer(request: Request, error: ApiError) -> Response:
        return Context.of(request.scope).protocol.error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        metrics.observe_rejected("invalid")
        status = Context.of(request.scope).protocol.invalid_status
        return answer(request, from_validation_error(error, request, status))

    @app.exception_handler(InvalidField)
    async def invalid_field(request: Request, error: InvalidField) -> Response:
        metrics.observe_rejected("invalid")
        status = Context.of(request.scope).protocol.invalid_status
        return answer(request, ApiError(status, str(error), code=error.code, param=error.field))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return answer(request, from_http_exception(error, request))

    @app.exception_handler(NotReady)
    async def not_ready(request: Request, error: NotReady) -> Response:
        if request.method == "POST":  # GET asks about the service itself
            metrics.observe_rejected("not_ready")
        return answer(request, unavailable(error.message, f"model_{error.state}"))

    @app.exception_handler(TemplateProcessError)
    async def no_template_process(request: Request, error: TemplateProcessError) -> Response:
        return answer(request, unavailable(str(error), "template_process"))

    @app.exception_handler(QueueFull)
    async def queue_full(request: Request, error: QueueFull) -> Response:
        return answer(request, _full(error))

    @app.exception_handler(PromptTooLong)
    async def too_long(request: Request, error: PromptTooLong) -> Response:
        field = _PROMPTS[request.scope["path"]].field
        message = Context.of(request.scope).protocol.too_long(error, field)
        failed = ApiError(400, message, code="context_length_exceeded", param=field)
        return answer(request, failed)

    @app.exception_handler(UnknownToken)
    async def unknown_token(request: Request, error: UnknownToken) -> Response:
        field = _PROMPTS[request.scope["path"]].field
        return answer(request, ApiError(400, str(error), code="invalid_value", param=field))
