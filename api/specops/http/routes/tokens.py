"""POST /tokenize, /detokenize and /apply-template, like those of llama.cpp's server."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from specops.engine.engine import Engine
from specops.http.answering.choosing import prompt_tokens
from specops.http.answering.conversation import render
from specops.http.answering.submit import computed_aside
from specops.http.answering.unknown import ignore_unknown, ignored_header
from specops.http.answering.writer import json_answer
from specops.http.errors import error_responses
from specops.http.schemas.body import Body
from specops.http.schemas.conversation import conversation
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
        found = [_piece(engine, token) for token in tokens] if body.with_pieces else list(tokens)
        return json_answer(TokenizeResponse(tokens=found), headers)

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
    asked = conversation(
        [message.for_template() for message in body.messages],
        "messages",
        body.tools,
        template_options=body.chat_template_kwargs or {},
    )
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
