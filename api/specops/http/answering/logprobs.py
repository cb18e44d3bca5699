"""Probabilities of tokens, as OpenAI's chats and Ollama tell them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field

from specops.request import Piece
from specops.text.tokenizer import Tokenizer


class TopLogprob(BaseModel):
    """A token that was possible in this position."""

    token: str
    logprob: float = Field(description="natural logarithm of its probability")
    bytes: list[int] = Field(description="UTF-8; a token may be a part of a character")


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


def token_logprobs(pieces: Sequence[Piece], tokenizer: Tokenizer) -> list[TokenLogprob]:
    """Return the tokens' probabilities; an empty list if nobody asked for them."""
    logprobs = []
    for piece in pieces:
        if piece.logprob is not None:
            top = [_top(token, value, tokenizer) for token, value in piece.logprob.top]
            chosen = _top(piece.token, piece.logprob.chosen, tokenizer)
            logprobs.append(TokenLogprob(**chosen.model_dump(), top_logprobs=top))
    return logprobs


def _top(token: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    text, encoded = tokenizer.spelling(token)
    return TopLogprob(token=text, logprob=logprob, bytes=list(encoded))
