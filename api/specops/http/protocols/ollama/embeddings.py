"""POST /api/embed and /api/embeddings, in Ollama's protocol: texts to vectors."""

import time
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from specops.http.answering.schema import (
    Integer,
    Text,
)
from specops.http.answering.submit import BatchRoute, embed
from specops.http.answering.writer import json_answer, list_answer
from specops.http.protocol import Prompt, Protocol
from specops.http.protocols.ollama.common import (
    ERRORS,
    MACHINE_OPTIONS,
    OllamaModel,
    nanoseconds,
    plain_answer,
    require_model,
)
from specops.http.state import Ctx
from specops.text.json_values import dumps

EMBED_PATH, OLD_EMBED_PATH = "/api/embed", "/api/embeddings"
router = APIRouter(tags=["ollama"], route_class=BatchRoute)
PROTOCOL = Protocol(
    router=router,
    prompts={
        EMBED_PATH: Prompt("input", "embeddings"),
        OLD_EMBED_PATH: Prompt("prompt", "embeddings"),
    },
)


class OllamaTexts(OllamaModel):
    """One or more texts to embed."""

    ignored_fields = MACHINE_OPTIONS | {"options"}

    input: Text | Annotated[list[Text], Field(max_length=2048, fail_fast=True)] | None = Field(
        None, description="none: only ask whether the model is loaded"
    )
    truncate: bool | None = Field(True, description="cut texts that are longer than the context")
    dimensions: Integer = Field(None, ge=0, description="cut vectors to this length; 0: do not")

    @property
    def inputs(self) -> list[str]:
        """The texts as a list, even if there is only one; a single empty text does not count."""
        texts = self.input or []
        return [texts] if isinstance(texts, str) else texts


class OllamaText(OllamaModel):
    """A text to embed, in the older form."""

    ignored_fields = MACHINE_OPTIONS | {"options", "truncate"}

    prompt: Text | None = Field(None, description="none: only ask whether the model is loaded")


class OllamaVectors(BaseModel):
    """All texts' vectors, in order."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(description="from the request's arrival, in nanoseconds")
    load_duration: int = 0
    prompt_eval_count: int = Field(description="tokens of all texts")


class OllamaVector(BaseModel):
    """A text's vector."""

    embedding: list[float]


@router.post(EMBED_PATH, response_model=OllamaVectors, responses=ERRORS)
async def embed_texts(body: OllamaTexts, ctx: Ctx) -> Response:
    """Embed one or more texts: the mean of the model's last hidden states, of norm 1."""
    engine = require_model(ctx, body)
    figures = OllamaVectors(
        model=body.model_name, embeddings=[], total_duration=1, prompt_eval_count=0
    )
    if not body.inputs:
        return plain_answer(figures, ctx, body)
    room = engine.info.context if body.truncate is not False else None
    generation, vectors, tokens = await embed(ctx, body, body.inputs, room=room)
    if 0 < (size := body.dimensions or 0) < vectors.shape[1]:
        vectors = vectors[:, :size]
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    figures.total_duration = nanoseconds(time.monotonic() - generation.arrival)
    figures.prompt_eval_count = tokens
    rest = figures.model_dump(exclude={"embeddings"})
    return list_answer(rest, "embeddings", map(dumps, vectors), generation.headers)


@router.post(OLD_EMBED_PATH, response_model=OllamaVector, responses=ERRORS)
async def embed_text(body: OllamaText, ctx: Ctx) -> Response:
    """Embed a text, in Ollama's older form; a text that is too long is cut."""
    engine = require_model(ctx, body)
    if not body.prompt:
        return plain_answer(OllamaVector(embedding=[]), ctx, body)
    room = engine.info.context
    generation, vectors, _ = await embed(ctx, body, [body.prompt], room=room)
    return json_answer(OllamaVector(embedding=vectors[0].tolist()), generation.headers)
