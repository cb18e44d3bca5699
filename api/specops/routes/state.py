"""What every endpoint works with: the application's settings, service and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from specops.config import Settings
from specops.metrics import Metrics
from specops.service import Service


@dataclass(frozen=True, slots=True)
class AppState:
    """Made once by `create_app`, never changed."""

    settings: Settings
    service: Service
    metrics: Metrics


def _app_state(request: Request) -> AppState:
    state: AppState = request.app.state.specops
    return state


State = Annotated[AppState, Depends(_app_state)]
