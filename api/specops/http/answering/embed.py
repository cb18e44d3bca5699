"""Embedding texts: the part that all protocols share.

A request takes one place in the queue and one slot, however many texts it has. The engine embeds
them one after the other, with the room that other requests leave in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from specops.http.answering.answers import Generation
from specops.http.answering.body import Body
from specops.http.answering.generate import enqueue, plain_request
from specops.http.answering.ignored import ignore_unknown
from specops.http.answering.offload import run_off_loop
from specops.http.answering.prompts import Tokens, mixed_tokens
from specops.http.errors import ApiError, InvalidField
from specops.http.security.request_body import MAX_BATCH_TOKENS
from specops.http.state import Context

Vector = npt.NDArray[np.float32]


async def embed(
    ctx: Context,
    body: Body,
    inputs: Sequence[str | list[int | str]],
    *,
    room: int | None = None,
) -> tuple[Generation, Vector, int]:
    """Embed texts.

    Args:
        ctx: of the HTTP request.
        body: the checked body.
        inputs: each as text or as tokens.
        room: number of tokens to which a text is cut; None: texts stay whole.

    Returns:
        The generation, the vectors [texts, entries], and the number of the texts' tokens.

    Raises:
        ApiError, InvalidField: the model has no embeddings, or a token does not exist.
        NotReady, QueueFull, PromptTooLong, UnknownToken: see `AsyncEngine.submit`.
    """
    engine = ctx.engine
    ignore_unknown(ctx, body)
    if not engine.info.embedding_size:
        raise ApiError(
            400,
            f"the graph of {engine.info.name} does not output the hidden states that embeddings "
            "need: serve a model that this server has converted",
            code="no_embeddings",
        )

    def read(item: str | list[int | str]) -> str | list[int | str]:
        if isinstance(item, str):
            return ctx.read_text(item)
        return [ctx.read_text(part) if isinstance(part, str) else part for part in item]

    def encode() -> list[Tokens]:
        encoded, left, whole = [], MAX_BATCH_TOKENS, room is None
        for item in inputs:
            encoded.append(mixed_tokens(read(item), engine, "input", any_length=not whole)[:room])
            left -= len(encoded[-1])
            if left < 0:
                message = f"more than {MAX_BATCH_TOKENS} tokens: send fewer texts at a time"
                raise InvalidField("input", message)
        return encoded

    encoded = await run_off_loop(ctx, encode, ctx.body_bytes)
    request = replace(
        plain_request(ctx),
        prompt_tokens=encoded[0],
        more_prompts=tuple(encoded[1:]),
        embed=True,
        stream=False,
    )
    logged_prompt = [read(item) for item in inputs] if ctx.settings.log_prompts else None
    generation = enqueue(ctx, [request], logged_prompt)
    (answer,) = await generation.finished()
    rows = answer.last.embeddings if answer.last else None
    if rows is None:
        raise AssertionError("a finished request for embeddings has them")
    return generation, rows, sum(map(len, encoded))
