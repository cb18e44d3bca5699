"""POST /v1/embeddings: texts to vectors, in OpenAI's protocol.

A request takes one place in the queue and one slot, however many texts it has. The engine embeds
them one after the other, with the room that other requests leave in a pass.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from specops.engine.engine import Engine
from specops.http.answering.choosing import prompt_tokens
from specops.http.answering.job import Job
from specops.http.answering.submit import computed, plain_request, submitted
from specops.http.answering.unknown import ignore_unknown
from specops.http.errors import ApiError, InvalidField
from specops.http.routes.openai import ERRORS, check_model
from specops.http.schemas.embeddings import EmbeddingList, EmbeddingRequest
from specops.http.state import AppState, State

PATH = "/v1/embeddings"
router = APIRouter(tags=["openai"])


@router.post(PATH, response_model=EmbeddingList, responses=ERRORS)
async def embeddings(body: EmbeddingRequest, request: Request, state: State) -> Response:
    """Embed one or several texts: the mean of the model's last hidden states, of length 1."""
    engine = check_model(body.model, state)
    ignore_unknown(body, request, state.settings)
    job, vectors, tokens = await embed(
        state, request, engine, body.inputs, body.input, size=body.dimensions
    )
    written = _written(vectors, tokens, engine.info.name, body.encoding_format == "base64")
    return StreamingResponse(written, headers=job.headers, media_type="application/json")


async def embed(
    state: AppState,
    request: Request,
    engine: Engine,
    inputs: Sequence[str | list[int]],
    shown: Any,
    *,
    size: int | None,
    room: int | None = None,
) -> tuple[Job, npt.NDArray[np.float32], int]:
    """Embed texts.

    Args:
        inputs: each as text or as tokens.
        shown: the input as the client sent it, for a log that shows prompts.
        size: number of entries that the client wants a vector to have.
        room: number of tokens to which a text is cut; None: texts stay whole.

    Returns:
        The job, the vectors of all texts [texts, entries], and the number of the texts' tokens.

    Raises:
        ApiError, InvalidField: the model has no embeddings, or none of that size.
        NotReady, QueueFull, PromptTooLong, UnknownToken: see `AsyncEngine.submit`.
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
    encoded = await computed(
        lambda: [prompt_tokens(item, engine, "input")[:room] for item in inputs],
        sum(map(len, inputs)),
        state.settings,
    )
    wanted = replace(
        plain_request(request, state.settings),
        prompt_tokens=encoded[0],
        more_prompts=tuple(encoded[1:]),
        embed=True,
        stream=False,
    )
    job = submitted(state, request, [wanted], shown=shown)
    (answer,) = await job.finished()
    found = answer.last.embeddings if answer.last else None
    if found is None:
        raise AssertionError("a finished request for embeddings has them")
    return job, found, sum(map(len, encoded))


async def _written(
    vectors: npt.NDArray[np.float32], tokens: int, model: str, as_base64: bool
) -> AsyncIterator[bytes]:
    """Write the answer vector by vector: thousands at once would block the event loop."""
    yield b'{"object":"list","data":['
    for index, vector in enumerate(vectors):
        entries = base64.b64encode(vector.astype("<f4")).decode() if as_base64 else vector
        item = {"object": "embedding", "index": index, "embedding": entries}
        yield b"," * (index > 0) + orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    yield b"]," + orjson.dumps({"model": model, "usage": usage})[1:]
