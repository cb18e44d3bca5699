"""Probabilities of tokens, as OpenAI's chats and Ollama tell them."""

from __future__ import annotations

from collections.abc import Sequence

from specops.http.schemas.chat import TokenLogprob, TopLogprob
from specops.request import Piece
from specops.text.tokenizer import Tokenizer


def token_logprobs(pieces: Sequence[Piece], tokenizer: Tokenizer) -> list[TokenLogprob]:
    """Return the tokens' probabilities; an empty list if nobody asked for them."""
    found = []
    for piece in pieces:
        if piece.logprob is not None:
            top = [_top(token, value, tokenizer) for token, value in piece.logprob.top]
            chosen = _top(piece.token, piece.logprob.chosen, tokenizer)
            found.append(TokenLogprob(**chosen.model_dump(), top_logprobs=top))
    return found


def _top(token: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    text, encoded = tokenizer.spelling(token)
    return TopLogprob(token=text, logprob=logprob, bytes=list(encoded))
