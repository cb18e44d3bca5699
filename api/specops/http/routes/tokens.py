"""POST /tokenize, /detokenize and /apply-template, like those of llama.cpp's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from specops.engine.engine import Engine
from specops.http.answering.choosing import prompt_tokens
from specops.http.answering.conversation import render
from specops.http.answering.submit import built, computed_aside
from specops.http.answering.unknown import ignore_unknown, ignored_header
from specops.http.answering.writer import json_answer
from specops.http.errors import error_responses
from specops.http.schemas.body import Body
from specops.http.schemas.tokens import (
    ApplyTemplateRequest,
    ApplyTemplateResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenPiece,
)
from specops.http.state import Context, Ctx
from specops.text.json_values import dumps

_PART = 1 << 12  # tokens that are written at once
_RESPONSES = error_responses(400, 401, 408, 413, 415, 422, 500, 503, 504)
router = APIRouter(tags=["tokens"])


@router.post("/tokenize", response_model=TokenizeResponse, responses=_RESPONSES)
async def tokenize(body: TokenizeRequest, ctx: Ctx) -> Response:
    """Encode a text."""
    engine = _engine(ctx, body)

    def spelled() -> tuple[Sequence[int], dict[int, bytes]]:
        tokens = engine.tokenizer.encode(body.content, special_tokens=body.add_special)
        texts: dict[int, bytes] = {}
        for token in tokens:
            if token not in texts:
                texts[token] = dumps(_piece(engine, token) if body.with_pieces else token)
        return tokens, texts

    tokens, texts = await computed_aside(ctx, spelled, len(body.content))

    async def written() -> AsyncIterator[bytes]:
        # In parts: a text of 1 MiB may have 500,000 pieces, an answer of 12 MB.
        yield b'{"tokens":['
        for start in range(0, len(tokens), _PART):
            part = b",".join([texts[token] for token in tokens[start : start + _PART]])
            yield b"," + part if start else part
            await asyncio.sleep(0)  # a fast client never makes the server wait
        yield b"]}"

    return StreamingResponse(written(), headers=ignored_header(ctx), media_type="application/json")


@router.post("/detokenize", response_model=DetokenizeResponse, responses=_RESPONSES)
async def detokenize(body: DetokenizeRequest, ctx: Ctx) -> Response:
    """Decode tokens; special tokens have no text."""
    engine = _engine(ctx, body)
    tokens = prompt_tokens(body.tokens, engine, "tokens")
    decode = engine.tokenizer.decode
    text = await computed_aside(ctx, lambda: decode(tokens), len(tokens))
    return json_answer(DetokenizeResponse(content=text), ignored_header(ctx))


@router.post("/apply-template", response_model=ApplyTemplateResponse, responses=_RESPONSES)
async def apply_template(body: ApplyTemplateRequest, ctx: Ctx) -> Response:
    """Write a conversation as one text with the model's chat template."""
    engine = _engine(ctx, body)
    asked = await built(ctx, body.conversation)
    text = await computed_aside(ctx, lambda: render(engine, asked), asked.size, renders=True)
    return json_answer(ApplyTemplateResponse(prompt=text), ignored_header(ctx))


def _engine(ctx: Context, body: Body) -> Engine:
    ignore_unknown(ctx, body)
    return ctx.engine


def _piece(engine: Engine, token: int) -> dict[str, Any]:
    text, encoded = engine.tokenizer.spelling(token)
    whole = text.encode() == encoded
    return TokenPiece(id=token, piece=text if whole else list(encoded)).model_dump()
