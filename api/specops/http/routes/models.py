"""GET /v1/models: what is served."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter

from specops.engine.engine import Engine
from specops.http.errors import error_responses
from specops.http.routes.openai import check_model
from specops.http.schemas.openai import Model, ModelList
from specops.http.state import AppState, State

router = APIRouter(prefix="/v1", tags=["openai"])


@router.get("/models", responses=error_responses(401, 500, 503))
async def models(state: State) -> ModelList:
    """List the model that is loaded."""
    name = state.service.engine.info.name
    return ModelList(data=[_model(state.service.engine, state)], first_id=name, last_id=name)


@router.get("/models/{model:path}", responses=error_responses(401, 404, 500, 503))
async def model(model: str, state: State) -> Model:
    """Tell about the model that is loaded."""
    return _model(check_model(model, state), state)


def _model(engine: Engine, state: AppState) -> Model:
    info = engine.info
    return Model(
        id=info.name,
        display_name=info.name,
        created=state.started,
        created_at=datetime.fromtimestamp(state.started, UTC).isoformat(),
        context_length=info.context,
        max_model_len=info.context,
        quantization=info.quant,
        drafters=list(info.drafters),
        chat=info.chat,
        batch_invariant=info.batch_invariant,
        foreign_products=list(info.foreign_products),
    )
