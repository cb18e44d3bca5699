"""Ollama's endpoints about models: GET /api/tags, /api/ps, /api/version, POST /api/show, /api/pull.

Lists call the model `NAME:latest`, as Ollama does, because clients look for that.
"""

import hashlib
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from specops.engine.engine import Engine
from specops.http.answering.schema import answer_headers, ignore_unknown
from specops.http.answering.submit import fingerprint, tagged
from specops.http.answering.writer import json_answer
from specops.http.errors import error_responses
from specops.http.protocol import Protocol
from specops.http.protocols.ollama.common import (
    ERRORS,
    LINES,
    RESPONSES,
    OllamaErrorResponse,
    OllamaModel,
    require_model,
    timestamp,
)
from specops.http.state import Context, Ctx
from specops.text.fill_in import FillIn

_MODEL_ERRORS = error_responses(401, 500, 503, model=OllamaErrorResponse)
# Clients require a minimum version of Ollama: `codex --oss` this one, for /v1/responses.
_PROTOCOL = "0.13.4"
_FOREVER = "2318-01-01T00:00:00Z"  # Ollama's expiry of a model that it never unloads
_ARCHITECTURE = "specops"  # prefix of the keys in `model_info`
router = APIRouter(tags=["ollama"])
PROTOCOL = Protocol(  # the conventions of all of Ollama's endpoints
    router=router,
    prefixes=("/api/",),
    id_headers=("x-request-id",),
    any_media_type=True,  # as Ollama does: its users' curl commands do not set the type
    error_json=lambda error: {"error": error.detail},
    event=b"%b\n",
    too_long_message="the input length exceeds the context length: {prompt} tokens > {longest}",
    unknown_model_message="model {requested!r} not found; this server has {tagged!r}",
)


class OllamaPull(OllamaModel):
    """A model to download; only the served model is accepted."""

    insecure: bool | None = Field(None, description="without effect: nothing is downloaded")
    stream: bool | None = Field(True, description="a line of JSON per step")


class OllamaStatus(BaseModel):
    """A download's progress; the served model is always complete."""

    status: str


@router.get("/api/version", responses=error_responses(401, 500, model=OllamaErrorResponse))
async def version() -> dict[str, str]:
    """Return the version of Ollama whose API this server implements."""
    return {"version": _PROTOCOL}


@router.get("/api/tags", responses=_MODEL_ERRORS)
async def tags(ctx: Ctx) -> dict[str, list[dict[str, Any]]]:
    """List the loaded model."""
    engine = ctx.engine
    more = {"modified_at": _loaded_since(ctx), "capabilities": _capabilities(engine)}
    return {"models": [_model(engine) | more]}


@router.get("/api/ps", responses=_MODEL_ERRORS)
async def running(ctx: Ctx) -> dict[str, list[dict[str, Any]]]:
    """List the loaded model, with its context length."""
    engine = ctx.engine
    more = {"expires_at": _FOREVER, "size_vram": 0, "context_length": engine.info.context}
    return {"models": [_model(engine) | more]}


@router.post("/api/show", responses=ERRORS)
async def show(body: OllamaModel, response: Response, ctx: Ctx) -> dict[str, Any]:
    """Describe the loaded model and its capabilities."""
    engine = require_model(ctx, body)
    ignore_unknown(ctx, body)
    response.headers.update(answer_headers(ctx))
    info, template = engine.info, engine.chat_template
    described = {
        "modelfile": _modelfile(engine),
        "parameters": "\n".join(f"{name:<30} {value:g}" for name, value in _parameters(engine)),
        "template": template.source if template else "",
        "details": _details(engine),
        "model_info": {
            "general.architecture": _ARCHITECTURE,
            "general.basename": info.name,
            "general.parameter_count": info.parameters,
            f"{_ARCHITECTURE}.context_length": info.context,
            f"{_ARCHITECTURE}.embedding_length": info.embedding_size,
            f"{_ARCHITECTURE}.vocab_size": info.vocab_size,
        },
        "capabilities": _capabilities(engine),
        "modified_at": _loaded_since(ctx),
    }
    return described if info.system is None else described | {"system": info.system}


@router.post("/api/pull", response_model=OllamaStatus, responses=RESPONSES)
async def pull(body: OllamaPull, ctx: Ctx) -> Response:
    """Report success for the loaded model, as Ollama does for one that it already has."""
    require_model(ctx, body, exact=True)
    ignore_unknown(ctx, body)
    headers = answer_headers(ctx)
    done = OllamaStatus(status="success")
    if body.stream is False:
        return json_answer(done, headers)
    lines = [OllamaStatus(status="pulling manifest"), done]
    text = "".join(f"{line.model_dump_json()}\n" for line in lines)
    return Response(text, headers=headers, media_type=LINES)


def _model(engine: Engine) -> dict[str, Any]:
    return {
        "name": tagged(engine.info.name),
        "model": tagged(engine.info.name),
        "size": engine.info.weight_bytes,
        # Clients show the beginning of the digest. It changes when a seed's output may change.
        "digest": hashlib.sha256(fingerprint(engine).encode()).hexdigest(),
        "details": _details(engine),
    }


def _capabilities(engine: Engine) -> list[str]:
    template = engine.chat_template
    capabilities = {
        "completion": True,
        "tools": template is not None,
        "thinking": bool(template and template.reasoning_tags),
        "insert": FillIn.of(engine.tokenizer) is not None,
        "embedding": bool(engine.info.embedding_size),
    }
    return [name for name, there in capabilities.items() if there]


def _loaded_since(ctx: Context) -> str:
    return timestamp(datetime.fromtimestamp(ctx.app.started, UTC))


def _details(engine: Engine) -> dict[str, Any]:
    info = engine.info
    return {
        "parent_model": "",
        "format": "onnx",
        "family": _ARCHITECTURE,
        "families": [_ARCHITECTURE],
        "parameter_size": f"{info.parameters / 1e6:.1f}M",
        "quantization_level": info.quant,
        "context_length": info.context,
        "embedding_length": info.embedding_size,
    }


def _parameters(engine: Engine) -> list[tuple[str, float]]:
    """Return the default sampling parameters, by Ollama's names."""
    values = engine.info.sampling.specified
    penalty = values.pop("repetition_penalty", None)
    return list(values.items()) + ([] if penalty is None else [("repeat_penalty", penalty)])


def _modelfile(engine: Engine) -> str:
    """Return the model and its settings as an Ollama Modelfile."""
    info, template = engine.info, engine.chat_template
    lines = [
        "# The server's model and settings as a Modelfile; the template is Jinja",
        f"FROM {tagged(engine.info.name)}",
    ]
    if template:
        lines.append(f'TEMPLATE """{template.source}"""')
    if info.system is not None:
        lines.append(f'SYSTEM """{info.system}"""')
    lines += [f"PARAMETER {name} {value:g}" for name, value in _parameters(engine)]
    return "\n".join(lines) + "\n"
