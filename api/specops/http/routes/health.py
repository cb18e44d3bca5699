"""Is it alive, is it ready, how is it doing: the endpoints that machines ask."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from specops.engine.engine import ModelState
from specops.http.schemas.health import HealthResponse, LiveResponse
from specops.http.state import State

router = APIRouter(tags=["health"])


@router.head("/health", include_in_schema=False)
@router.get(
    "/health",
    response_model=HealthResponse,
    responses={503: {"model": HealthResponse, "description": "the model is not ready"}},
)
async def health(state: State) -> JSONResponse:
    """Say how far the model is: 200 once it answers, 503 before and while draining."""
    service = state.service
    body = HealthResponse(
        state=service.state,
        detail=service.detail,
        model=service.info.name if service.info else state.settings.preset,
        error=service.error,
        running=service.running,
        waiting=service.waiting,
    )
    ready = service.state is ModelState.READY
    return JSONResponse(body.model_dump(), 200 if ready else 503)


@router.head("/health/live", include_in_schema=False)
@router.get(
    "/health/live",
    response_model=LiveResponse,
    responses={503: {"model": LiveResponse, "description": "restart the process"}},
)
async def live(state: State) -> JSONResponse:
    """Say whether the process should live: 503 where only a restart helps.

    A model that could not be loaded is no reason to restart (it would fail again, and the reason
    could not be read); an engine that died after it had served is.
    """
    service = state.service
    is_live = service.alive or service.info is None
    return JSONResponse({"live": is_live}, 200 if is_live else 503)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, state: State) -> Response:
    """Return the service's figures for Prometheus."""
    page, content_type = state.metrics.expose(request.headers.get("accept", ""))
    return Response(page, headers={"content-type": content_type})
