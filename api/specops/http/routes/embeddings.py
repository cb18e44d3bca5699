"""POST /v1/embeddings: texts to vectors, in OpenAI's protocol.

A request takes one place in the queue and one slot, however many texts it has. The engine embeds
them one after the other, with the room that other requests leave in a pass.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from specops.engine.engine import Engine
from specops.http.answering.choosing import prompt_tokens
from specops.http.answering.job import Job
from specops.http.answering.submit import computed, plain_request, submitted
from specops.http.answering.unknown import ignore_unknown
from specops.http.errors import ApiError, InvalidField
from specops.http.routes.openai import ERRORS, check_model
from specops.http.schemas.embeddings import EmbeddingList, EmbeddingRequest
from specops.http.state import Context, Ctx

PATH = "/v1/embeddings"
router = APIRouter(tags=["openai"])
Vector = npt.NDArray[np.float32]


@router.post(PATH, response_model=EmbeddingList, responses=ERRORS)
async def embeddings(body: EmbeddingRequest, ctx: Ctx) -> Response:
    """Embed one or several texts: the mean of the model's last hidden states, of length 1."""
    engine = check_model(ctx, body.model)
    ignore_unknown(ctx, body)
    job, vectors, tokens = await embed(ctx, engine, body.inputs, body.input, size=body.dimensions)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}

    def item(index: int, vector: Vector) -> dict[str, Any]:
        as_base64 = body.encoding_format == "base64"
        entries = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector
        return {"object": "embedding", "index": index, "embedding": entries}

    rest = {"object": "list", "model": engine.info.name, "usage": usage}
    return vectors_answer("data", vectors, item, rest, job.headers)


async def embed(
    ctx: Context,
    engine: Engine,
    inputs: Sequence[str | list[int]],
    shown: Any,
    *,
    size: int | None,
    room: int | None = None,
) -> tuple[Job, Vector, int]:
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
        ctx,
        lambda: [prompt_tokens(item, engine, "input")[:room] for item in inputs],
        sum(map(len, inputs)),
    )
    wanted = replace(
        plain_request(ctx),
        prompt_tokens=encoded[0],
        more_prompts=tuple(encoded[1:]),
        embed=True,
        stream=False,
    )
    job = submitted(ctx, [wanted], shown=shown)
    (answer,) = await job.finished()
    found = answer.last.embeddings if answer.last else None
    if found is None:
        raise AssertionError("a finished request for embeddings has them")
    return job, found, sum(map(len, encoded))


def vectors_answer(
    field: str,
    vectors: Vector,
    item: Callable[[int, Vector], Any],
    rest: Mapping[str, Any],
    headers: Mapping[str, str],
) -> Response:
    """Return an answer that is written vector by vector: thousands at once hold the event loop.

    Args:
        field: name of the list of vectors.
        vectors: [texts, entries].
        item: makes an item of the list from its index and its vector.
        rest: the other fields.
        headers: of the response.
    """

    async def written() -> AsyncIterator[bytes]:
        yield orjson.dumps(rest)[:-1] + f',"{field}":['.encode()
        for index, vector in enumerate(vectors):
            text = orjson.dumps(item(index, vector), option=orjson.OPT_SERIALIZE_NUMPY)
            yield b"," + text if index else text
            await asyncio.sleep(0)  # a fast client never makes the server wait
        yield b"]}"

    return StreamingResponse(written(), headers=dict(headers), media_type="application/json")
