"""POST /tokenize, /detokenize and /apply-template, like those of llama.cpp's server."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

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

_RESPONSES = error_responses(400, 401, 408, 413, 415, 422, 500, 503, 504)
router = APIRouter(tags=["tokens"])


@router.post("/tokenize", response_model=TokenizeResponse, responses=_RESPONSES)
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> Response:
    """Encode a text."""
    engine = _engine(body, request, state)
    headers = ignored_header(request)

    def answer() -> Response:
        tokens = engine.tokenizer.encode(body.content, special_tokens=body.add_special)
        if not body.with_pieces:
            return json_answer(TokenizeResponse(tokens=list(tokens)), headers)
        return json_answer(
            TokenizeResponse.model_construct(tokens=[_piece(engine, token) for token in tokens]),
            headers,
        )

    return await computed_aside(answer, len(body.content), state.settings)


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


def _piece(engine: Engine, token: int) -> TokenPiece:
    text, encoded = engine.tokenizer.spelling(token)
    whole = text.encode() == encoded
    return TokenPiece(id=token, piece=text if whole else list(encoded))
