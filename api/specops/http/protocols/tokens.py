"""POST /tokenize, /detokenize and /apply-template, like those of llama.cpp's server."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from specops.engine.engine import Engine
from specops.http.answering.prompt import (
    ChatTool,
    Conversation,
    conversation,
    prompt_tokens,
    render,
)
from specops.http.answering.schema import (
    Body,
    FreeObject,
    Items,
    Some,
    Text,
    TokenId,
    Tools,
    answer_headers,
    ignore_unknown,
)
from specops.http.answering.submit import run_limited
from specops.http.answering.writer import json_answer, list_answer
from specops.http.errors import error_responses
from specops.http.protocol import Protocol
from specops.http.protocols.openai.chat import Message
from specops.http.state import Context, Ctx
from specops.text.json_values import dumps


class TokenizeRequest(Body):
    """A text to encode."""

    content: Text
    add_special: bool = Field(False, description="with the special tokens that begin a prompt")
    parse_special: bool | None = Field(
        True, description="false: encode special tokens' texts as plain text"
    )
    with_pieces: bool = Field(False, description="report each token's text as well")


class TokenPiece(BaseModel):
    """A token and its spelling."""

    id: int
    piece: str | list[int] = Field(description="text, or the bytes of a partial character")


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece]


class DetokenizeRequest(Body):
    """Tokens to decode."""

    tokens: Items[TokenId]


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    content: str


class ApplyTemplateRequest(Body):
    """A conversation to render as one text."""

    messages: Some[Message]
    tools: Tools[ChatTool] | None = None
    chat_template_kwargs: FreeObject | None = None
    add_generation_prompt: bool | None = Field(
        True, description="false: omit the beginning of the assistant's answer"
    )

    def conversation(self) -> Conversation:
        """Return the conversation in the form that all protocols share.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        ignored: list[str] = []
        return conversation(
            [message.for_template(ignored) for message in self.messages],
            "messages",
            self.tools,
            ignored=ignored,
            asks=self.add_generation_prompt is not False,
            template_options=self.chat_template_kwargs,
        )


class ApplyTemplateResponse(BaseModel):
    """The rendered prompt."""

    prompt: str


_PART = 1 << 12  # tokens per part of an answer
_RESPONSES = error_responses(400, 401, 408, 413, 415, 500, 503, 504)
router = APIRouter(tags=["tokens"])
PROTOCOL = Protocol(router=router, prefixes=("/tokenize", "/detokenize", "/apply-template"))


@router.post("/tokenize", response_model=TokenizeResponse, responses=_RESPONSES)
async def tokenize(body: TokenizeRequest, ctx: Ctx) -> Response:
    """Encode a text."""
    engine = _engine(ctx, body)

    def spelled() -> tuple[Sequence[int], dict[int, bytes]]:
        tokenizer = engine.tokenizer
        parts: Iterable[Sequence[int]]
        if body.parse_special is False:
            begin = tokenizer.begin if body.add_special else ()
            parts = (begin, tokenizer.encode_as_text(body.content, frozenset()))
        else:
            parts = tokenizer.parts(body.content, special_tokens=body.add_special)
        tokens = array("I")  # a tenth of a list's memory, held while a client reads slowly
        for part in parts:
            tokens.extend(part)
        texts: dict[int, bytes] = {}
        for token in tokens:
            if token not in texts:
                texts[token] = dumps(_piece(engine, token) if body.with_pieces else token)
        return tokens, texts

    tokens, texts = await run_limited(ctx, spelled, len(body.content))

    # In parts: a text of 1 MiB may have 500,000 pieces, an answer of 12 MB.
    parts = (tokens[start : start + _PART] for start in range(0, len(tokens), _PART))
    items = (b",".join([texts[token] for token in part]) for part in parts)
    return list_answer({}, "tokens", items, answer_headers(ctx))


@router.post("/detokenize", response_model=DetokenizeResponse, responses=_RESPONSES)
async def detokenize(body: DetokenizeRequest, ctx: Ctx) -> Response:
    """Decode tokens, special ones included."""
    engine = _engine(ctx, body)
    tokens = prompt_tokens(body.tokens, engine, "tokens")
    decode = engine.tokenizer.decode
    text = await run_limited(ctx, lambda: decode(tokens, special=True), len(tokens))
    return json_answer(DetokenizeResponse(content=text), answer_headers(ctx))


@router.post("/apply-template", response_model=ApplyTemplateResponse, responses=_RESPONSES)
async def apply_template(body: ApplyTemplateRequest, ctx: Ctx) -> Response:
    """Render a conversation with the model's chat template."""
    engine = _engine(ctx, body)
    text = await run_limited(
        ctx, lambda: render(engine, body.conversation()), ctx.body_bytes, renders=True
    )
    return json_answer(ApplyTemplateResponse(prompt=text), answer_headers(ctx))


def _engine(ctx: Context, body: Body) -> Engine:
    ignore_unknown(ctx, body)
    return ctx.engine


def _piece(engine: Engine, token: int) -> dict[str, Any]:
    text, encoded = engine.tokenizer.spelling(token)
    whole = text.encode() == encoded
    return TokenPiece(id=token, piece=text if whole else list(encoded)).model_dump()
