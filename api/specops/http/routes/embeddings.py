"""POST /v1/embeddings: texts to vectors, as OpenAI has it.

A request takes one place in the queue and one slot, however many texts it has: the engine embeds
them one after the other, with what the requests beside it leave of a pass.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from specops.engine.engine import Engine
from specops.http.choosing import prompt_tokens
from specops.http.errors import ApiError, InvalidField
from specops.http.routes.job import Job, Prompts, plain_request, submitted
from specops.http.routes.openai import ERRORS, check_model
from specops.http.routes.unknown import ignore_unknown
from specops.http.schemas.embeddings import EmbeddingList, EmbeddingRequest
from specops.http.state import AppState, State

PATH = "/v1/embeddings"
router = APIRouter(tags=["openai"])


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of all texts [texts, entries], and how many tokens these had."""

    job: Job
    vectors: npt.NDArray[np.float32]
    tokens: int


@router.post(PATH, response_model=EmbeddingList, responses=ERRORS)
async def embeddings(body: EmbeddingRequest, request: Request, state: State) -> Response:
    """Embed one or several texts: the mean of the model's last hidden states, of length 1."""
    engine = check_model(body.model, state)
    ignore_unknown(body, request, state.settings)
    found = await embed(state, request, engine, body.inputs, body.input, size=body.dimensions)
    written = _written(found, body.encoding_format == "base64", engine.info.name)
    return StreamingResponse(written, headers=found.job.headers, media_type="application/json")


async def embed(
    state: AppState,
    request: Request,
    engine: Engine,
    inputs: Sequence[str | list[int]],
    shown: Any,
    *,
    size: int | None,
    room: int | None = None,
) -> Embedded:
    """Embed texts.

    Args:
        inputs: each as text or as tokens.
        shown: what a log that shows prompts gets.
        size: that the client wants vectors to have.
        room: tokens of a text that are taken; None: all.

    Raises:
        ApiError, InvalidField: the model has no such embeddings.
        NotReady, QueueFull, PromptTooLong: see `AsyncEngine.submit`.
    """
    own = engine.info.embedding_size
    if not own:
        raise ApiError(
            400,
            f"the graph of {engine.info.name} does not give the hidden states that embeddings are "
            "made of: serve a model that was converted here",
            code="no_embeddings",
        )
    if size not in (None, own):
        raise InvalidField(
            "dimensions", f"this model's embeddings have {own}; shorter ones would mean nothing"
        )
    prompts = Prompts(
        lambda engine: [prompt_tokens(item, engine, "input")[:room] for item in inputs],
        1,
        sum(map(len, inputs)),
        shown,
    )
    encoded = await prompts.encoded(engine, state.settings)
    wanted = replace(
        plain_request(request, state.settings),
        prompt_tokens=encoded[0],
        more_prompts=tuple(encoded[1:]),
        embed=True,
        stream=False,
    )
    job = submitted(state, request, [wanted], prompts)
    (answer,) = await job.finished()
    found = answer.last.embeddings if answer.last else None
    if found is None:
        raise AssertionError("a request for embeddings that ends well has them")
    return Embedded(job, found, sum(map(len, encoded)))


async def _written(found: Embedded, as_base64: bool, model: str) -> AsyncIterator[bytes]:
    """The answer, a vector at a time: thousands of them at once would keep the event loop."""
    yield b'{"object":"list","data":['
    for index, vector in enumerate(found.vectors):
        told = base64.b64encode(vector.astype("<f4")).decode() if as_base64 else vector
        item = {"object": "embedding", "index": index, "embedding": told}
        yield b"," * (index > 0) + orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY)
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    yield b"]," + orjson.dumps({"model": model, "usage": usage})[1:]
