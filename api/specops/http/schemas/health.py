"""GET /health and /health/live: how the service is."""

from __future__ import annotations

from pydantic import BaseModel, Field


class HealthResponse(BaseModel):
    """Where the model is on its way to serving."""

    state: str
    detail: str = Field(description="what it is doing")
    model: str
    error: str | None = Field(description="why it failed")
    running: int
    waiting: int


class LiveResponse(BaseModel):
    """Whether the process should live."""

    live: bool
