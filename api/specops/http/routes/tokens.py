"""POST /tokenize, /detokenize and /apply-template, like those of llama.cpp's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
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
from specops.http.state import AppState, State
from specops.text.json_values import dumps

_PART = 1 << 12  # tokens that are written at once
_RESPONSES = error_responses(400, 401, 408, 413, 415, 422, 500, 503, 504)
router = APIRouter(tags=["tokens"])


@router.post("/tokenize", response_model=TokenizeResponse, responses=_RESPONSES)
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> Response:
    """Encode a text."""
    engine = _engine(body, request, state)

    def spelled() -> tuple[Sequence[int], dict[int, bytes]]:
        tokens = engine.tokenizer.encode(body.content, special_tokens=body.add_special)
        texts: dict[int, bytes] = {}
        for token in tokens:
            if token not in texts:
                texts[token] = dumps(_piece(engine, token) if body.with_pieces else token)
        return tokens, texts

    tokens, texts = await computed_aside(spelled, len(body.content), state.settings)

    async def written() -> AsyncIterator[bytes]:
        # In parts: a text of 1 MiB may have 500,000 pieces, an answer of 12 MB.
        yield b'{"tokens":['
        for start in range(0, len(tokens), _PART):
            part = b",".join([texts[token] for token in tokens[start : start + _PART]])
            yield b"," + part if start else part
            await asyncio.sleep(0)  # a fast client never makes the server wait
        yield b"]}"

    return StreamingResponse(
        written(), headers=ignored_header(request), media_type="application/json"
    )


@router.post("/detokenize", response_model=DetokenizeResponse, responses=_RESPONSES)
async def detokenize(body: DetokenizeRequest, request: Request, state: State) -> Response:
    """Decode tokens; special tokens have no text."""
    engine = _engine(body, request, state)
    tokens = prompt_tokens(body.tokens, engine, "tokens")
    decode = engine.tokenizer.decode
    text = await computed_aside(lambda: decode(tokens), len(tokens), state.settings)
    return json_answer(DetokenizeResponse(content=text), ignored_header(request))


@router.post("/apply-template", response_model=ApplyTemplateResponse, responses=_RESPONSES)
async def apply_template(body: ApplyTemplateRequest, request: Request, state: State) -> Response:
    """Write a conversation as one text with the model's chat template."""
    engine = _engine(body, request, state)
    asked = await built(body.conversation, request, state.settings)
    text = await computed_aside(
        lambda: render(engine, asked), asked.size, state.settings, renders=True
    )
    return json_answer(ApplyTemplateResponse(prompt=text), ignored_header(request))


def _engine(body: Body, request: Request, state: AppState) -> Engine:
    ignore_unknown(body, request, state.settings)
    return state.service.engine


def _piece(engine: Engine, token: int) -> dict[str, Any]:
    text, encoded = engine.tokenizer.spelling(token)
    whole = text.encode() == encoded
    return TokenPiece(id=token, piece=text if whole else list(encoded)).model_dump()
