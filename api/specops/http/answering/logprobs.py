"""Probabilities of tokens, as OpenAI's chats and Ollama tell them, and of prompts, as vLLM does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, Field

from specops.request import Logprob, TokenOutput
from specops.text.tokenizer import Tokenizer


class TopLogprob(BaseModel):
    """A token that was possible in this position."""

    token: str
    logprob: float = Field(description="natural logarithm of its probability")
    bytes: list[int] = Field(description="UTF-8; a token may be a part of a character")


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


def token_name(token: int, tokenizer: Tokenizer, *, as_id: bool) -> str:
    """Return a token's text, or, as vLLM writes it where texts might be equal, its number.

    Args:
        token: its number.
        tokenizer: knows its text.
        as_id: write `token_id:NUMBER`.
    """
    return f"token_id:{token}" if as_id else tokenizer.spelling(token)[0]


def prompt_logprobs(
    tokens: Sequence[int], told: Sequence[Logprob | None], top: int, tokenizer: Tokenizer
) -> Iterator[dict[str, Any] | None]:
    """Yield a prompt's probabilities in vLLM's form: of each token, and of the likeliest there.

    They are made one by one while the JSON is written: together they would take ten times its size.

    Args:
        tokens: of the prompt.
        told: their probabilities.
        top: number of likeliest tokens to report.
        tokenizer: spells the tokens.
    """
    for token, one in zip(tokens, told, strict=False):
        if one is None:
            yield None
            continue
        ranked = {token: (one.chosen, one.rank)}
        ranked |= {item: (value, at) for at, (item, value) in enumerate(one.top[:top], 1)}
        yield {
            str(item): {
                "logprob": value,
                "rank": rank,
                "decoded_token": tokenizer.spelling(item)[0],
            }
            for item, (value, rank) in ranked.items()
        }


def token_logprobs(
    pieces: Sequence[TokenOutput], tokenizer: Tokenizer, *, as_ids: bool = False
) -> list[TokenLogprob]:
    """Return the tokens' probabilities; an empty list if nobody asked for them.

    Args:
        pieces: the tokens, in order.
        tokenizer: spells the tokens.
        as_ids: see `token_name`.
    """
    logprobs = []
    for piece in pieces:
        if piece.logprob is not None:
            top = [_top(token, value, tokenizer, as_ids) for token, value in piece.logprob.top]
            chosen = _top(piece.token, piece.logprob.chosen, tokenizer, as_ids)
            logprobs.append(TokenLogprob(**chosen.model_dump(), top_logprobs=top))
    return logprobs


def _top(token: int, logprob: float, tokenizer: Tokenizer, as_id: bool) -> TopLogprob:
    name, encoded = token_name(token, tokenizer, as_id=as_id), tokenizer.spelling(token)[1]
    return TopLogprob(token=name, logprob=logprob, bytes=list(encoded))
