"""GET /health, /health/live and /metrics: the endpoints that other programs poll."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from specops.engine.model_info import ModelState
from specops.http.errors import without_folders
from specops.http.state import Ctx

router = APIRouter(tags=["health"])


class HealthResponse(BaseModel):
    """The state of the model, and the load."""

    status: str = Field(description="`ok`, as llama-server says it, or the state")
    state: str
    detail: str = Field(description="what the service is doing")
    model: str
    error: str | None = Field(None, description="why loading failed")
    running: int
    waiting: int


class LiveResponse(BaseModel):
    """Whether the process can still serve requests."""

    live: bool


@router.get(
    "/health",
    response_model=HealthResponse,
    responses={503: {"model": HealthResponse, "description": "the model is not ready"}},
)
async def health(ctx: Ctx) -> JSONResponse:
    """Return the state of the model: 200 once it is ready, 503 before and while draining."""
    service = ctx.app.service
    ready = service.state is ModelState.READY
    body = HealthResponse(
        status="ok" if ready else service.state,
        state=service.state,
        detail=without_folders(service.detail),
        model=service.info.name if service.info else ctx.settings.preset,
        error=service.error and without_folders(service.error),
        running=service.running,
        waiting=service.waiting,
    )
    return JSONResponse(body.model_dump(exclude_none=True), 200 if ready else 503)


@router.get(
    "/health/live",
    response_model=LiveResponse,
    responses={503: {"model": LiveResponse, "description": "restart the process"}},
)
async def live(ctx: Ctx) -> JSONResponse:
    """Return 503 if only a restart helps, otherwise 200.

    A model that could not be loaded is no reason to restart: it would fail again, and the error
    message would be lost. An engine that died after it had served requests is a reason.
    """
    service = ctx.app.service
    is_live = service.alive or service.info is None
    return JSONResponse({"live": is_live}, 200 if is_live else 503)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, ctx: Ctx) -> Response:
    """Return the service's figures for Prometheus."""
    page, content_type = ctx.app.metrics.expose(request.headers.get("accept", ""))
    return Response(page, headers={"content-type": content_type})
