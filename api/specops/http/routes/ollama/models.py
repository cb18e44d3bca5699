"""What Ollama's clients ask about models, and /api/embed."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from specops.engine.engine import Engine
from specops.http.answers import json_answer
from specops.http.errors import OllamaErrorResponse, error_responses
from specops.http.routes.embeddings import embed
from specops.http.routes.ollama.generating import ERRORS, nanoseconds, served
from specops.http.routes.openai import fingerprint
from specops.http.routes.unknown import ignore_unknown, ignored_header
from specops.http.schemas.ollama import OllamaName, OllamaTexts, OllamaVectors
from specops.http.state import AppState, State
from specops.text.fill_in import FillIn

EMBED_PATH = "/api/embed"
_PROTOCOL = "0.12.0"  # the version of Ollama whose API this is: clients ask for a least one
_FOREVER = "9999-12-31T23:59:59Z"  # a model is never unloaded
_ARCHITECTURE = "specops"  # prefix of the keys of `model_info`
_TOLD = error_responses(401, 500, 503, model=OllamaErrorResponse)
router = APIRouter(tags=["ollama"])


@router.get("/api/version", responses=error_responses(401, 500, model=OllamaErrorResponse))
async def version() -> dict[str, str]:
    """Tell the version of Ollama whose API this is."""
    return {"version": _PROTOCOL}


@router.get("/api/tags", responses=_TOLD)
async def tags(state: State) -> dict[str, list[dict[str, Any]]]:
    """List the model that is loaded."""
    return {"models": [_model(state.service.engine, state)]}


@router.get("/api/ps", responses=_TOLD)
async def running(state: State) -> dict[str, list[dict[str, Any]]]:
    """List the model that is loaded, and how much text it takes."""
    engine = state.service.engine
    more = {"expires_at": _FOREVER, "size_vram": 0, "context_length": engine.info.context}
    return {"models": [_model(engine, state) | more]}


@router.post("/api/show", responses=ERRORS)
async def show(
    body: OllamaName, request: Request, response: Response, state: State
) -> dict[str, Any]:
    """Tell what the model that is loaded is and can do."""
    engine = served(body.model, state)
    ignore_unknown(body, request, state.settings)
    response.headers.update(ignored_header(request))
    info = engine.info
    return {
        "modified_at": _since(state),
        "details": _details(engine),
        "model_info": {
            "general.architecture": _ARCHITECTURE,
            "general.parameter_count": info.parameters,
            f"{_ARCHITECTURE}.context_length": info.context,
            f"{_ARCHITECTURE}.embedding_length": info.embedding_size,
        },
        "capabilities": _capabilities(engine),
    }


@router.post(EMBED_PATH, response_model=OllamaVectors, responses=ERRORS)
async def embeddings(body: OllamaTexts, request: Request, state: State) -> Response:
    """Embed one or several texts: the mean of the model's last hidden states, of length 1."""
    engine = served(body.model, state)
    ignore_unknown(body, request, state.settings)
    room = engine.info.context - 1 if body.truncate is not False else None
    found = await embed(
        state, request, engine, body.inputs, body.input, size=body.dimensions, room=room
    )
    reply = OllamaVectors(
        model=engine.info.name,
        embeddings=found.vectors.tolist(),
        total_duration=nanoseconds(time.monotonic() - found.job.arrival),
        prompt_eval_count=found.tokens,
    )
    return json_answer(reply, found.job.headers)


def _model(engine: Engine, state: AppState) -> dict[str, Any]:
    name = engine.info.name
    return {
        "name": name,
        "model": name,
        "modified_at": _since(state),
        "size": engine.info.weight_bytes,
        # Clients show the beginning of one: here it goes with what a seed's output goes with.
        "digest": hashlib.sha256(fingerprint(engine).encode()).hexdigest(),
        "details": _details(engine),
    }


def _since(state: AppState) -> str:
    return datetime.fromtimestamp(state.started, UTC).isoformat()


def _details(engine: Engine) -> dict[str, Any]:
    info = engine.info
    return {
        "parent_model": "",
        "format": "onnx",
        "family": _ARCHITECTURE,
        "families": [_ARCHITECTURE],
        "parameter_size": f"{info.parameters / 1e6:.1f}M",
        "quantization_level": info.quant,
    }


def _capabilities(engine: Engine) -> list[str]:
    template = engine.chat_template
    has = {
        "completion": True,
        "tools": bool(template and template.calls),
        "thinking": bool(template and template.thinking),
        "insert": FillIn.of(engine.tokenizer) is not None,
        "embedding": bool(engine.info.embedding_size),
    }
    return [name for name, there in has.items() if there]
