"""Ollama's endpoints that the engine works for: POST /api/chat, /api/generate, /api/embed.

A stream is a line of JSON per step. The served model is always loaded; answers call it what the
request did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
from fastapi import APIRouter, Response
from pydantic import BaseModel

from specops.engine.engine import Engine
from specops.http.answering.choosing import fill_in, prompt_tokens
from specops.http.answering.conversation import arguments, call_id, converse, joined_text
from specops.http.answering.job import Job, Step
from specops.http.answering.logprobs import token_logprobs
from specops.http.answering.submit import Tokens, start
from specops.http.answering.unknown import ignore_unknown, ignored_header
from specops.http.answering.writer import Writer, json_answer
from specops.http.routes.embeddings import embed, vectors_answer
from specops.http.routes.ollama_models import ERRORS, LINES, RESPONSES, served, told_time
from specops.http.schemas.ollama import (
    OllamaChat,
    OllamaChatReply,
    OllamaModel,
    OllamaPrompt,
    OllamaPromptReply,
    OllamaReply,
    OllamaRequest,
    OllamaText,
    OllamaTexts,
    OllamaVector,
    OllamaVectors,
)
from specops.http.state import Context, Ctx
from specops.request import Piece
from specops.text.json_values import dumps

CHAT_PATH, PROMPT_PATH = "/api/chat", "/api/generate"
EMBED_PATH, OLD_EMBED_PATH = "/api/embed", "/api/embeddings"
# Ollama's client for Python ends a line at each of these. They stand in texts only.
_LINE_ENDS = "\u0085\u2028\u2029"
router = APIRouter(tags=["ollama"])

Calls = Sequence[dict[str, Any]]
Fields = Callable[[str, str, Calls], dict[str, Any]]  # of a reply, from text, thoughts and calls


@router.post(CHAT_PATH, response_model=OllamaChatReply, responses=RESPONSES)
async def chat(body: OllamaChat, ctx: Ctx) -> Response:
    """Continue a conversation.

    With `stream`, which is the default, the answer is a line of JSON per step; the last one has
    the figures.
    """
    engine = served(ctx, body)
    if not body.messages:
        reply = OllamaChatReply(**_nothing_asked(body), **_message("", "", ()))
        return _plain(reply, ctx, body)
    job = await converse(ctx, body, body.conversation)
    return await _Writer(job, engine, body, OllamaChatReply, _message).response(stream=body.streams)


@router.post(PROMPT_PATH, response_model=OllamaPromptReply, responses=RESPONSES)
async def generate(body: OllamaPrompt, ctx: Ctx) -> Response:
    """Answer a prompt; with `raw`, or where the model is no chat model, continue it."""
    engine = served(ctx, body)
    body.check()
    before = prompt_tokens(body.context or [], engine, "context")
    if not (body.prompt or body.suffix):
        return _plain(OllamaPromptReply(**_nothing_asked(body), response=""), ctx, body)
    if not (body.raw or body.suffix) and (engine.info.chat or body.system):
        job = await converse(ctx, body, body.conversation)
    else:
        gap, prompt, suffix = fill_in(body.suffix, engine), body.prompt or "", body.suffix or ""

        def encoded() -> Tokens:
            if gap:
                return gap.prompt(prompt, suffix)
            if before:
                return (*before, *engine.tokenizer.encode(prompt, special_tokens=False))
            return engine.encode(prompt)

        job = await start(
            ctx,
            body,
            lambda: [encoded()],
            size=len(prompt) + len(suffix),
            shown=prompt,
            gap=gap,
        )
    writer = _Writer(job, engine, body, OllamaPromptReply, _response)
    return await writer.response(stream=body.streams)


@router.post(EMBED_PATH, response_model=OllamaVectors, responses=ERRORS)
async def embed_texts(body: OllamaTexts, ctx: Ctx) -> Response:
    """Embed one or several texts: the mean of the model's last hidden states, of length 1."""
    engine = served(ctx, body)
    figures = OllamaVectors(model=body.called, embeddings=[], total_duration=1, prompt_eval_count=0)
    if not body.inputs:
        return _plain(figures, ctx, body)
    ignore_unknown(ctx, body)
    room = engine.info.context if body.truncate is not False else None
    job, vectors, tokens = await embed(ctx, engine, body.inputs, body.input, size=None, room=room)
    if 0 < (size := body.dimensions or 0) < vectors.shape[1]:
        vectors = vectors[:, :size]
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    figures.total_duration = _nanoseconds(time.monotonic() - job.arrival)
    figures.prompt_eval_count = tokens
    rest = figures.model_dump(exclude={"embeddings"})
    return vectors_answer("embeddings", vectors, lambda _, vector: vector, rest, job.headers)


@router.post(OLD_EMBED_PATH, response_model=OllamaVector, responses=ERRORS)
async def embed_text(body: OllamaText, ctx: Ctx) -> Response:
    """Embed a text, in Ollama's older form; a text that is too long is cut."""
    engine = served(ctx, body)
    if not body.prompt:
        return _plain(OllamaVector(embedding=[]), ctx, body)
    ignore_unknown(ctx, body)
    room = engine.info.context
    job, vectors, _ = await embed(ctx, engine, [body.prompt], body.prompt, size=None, room=room)
    return json_answer(OllamaVector(embedding=vectors[0].tolist()), job.headers)


def _plain(reply: BaseModel, ctx: Context, body: OllamaModel) -> Response:
    """Return the answer to a request for which the engine does nothing."""
    ignore_unknown(ctx, body)
    return json_answer(reply, ignored_header(ctx), exclude_none=True)


def _nothing_asked(body: OllamaRequest) -> dict[str, Any]:
    """Return the answer to an empty request, by which clients have a model loaded or unloaded."""
    return _heading(body) | {"done": True, "done_reason": body.done_reason}


class _Writer(Writer):
    media_type = LINES
    pause = b""  # a line of JSON has no comments
    exclude_none = True

    def __init__(
        self,
        job: Job,
        engine: Engine,
        body: OllamaRequest,
        schema: type[OllamaReply],
        fields: Fields,
    ) -> None:
        super().__init__(job)
        self._engine = engine
        self._body = body
        self._schema = schema
        self._fields = fields
        (self._answer,) = job.answers

    def whole(self) -> OllamaReply:
        answer = self._answer
        text, thoughts = answer.text, ""
        if answer.reader:
            text, thoughts = (joined_text(answer.blocks, kind) for kind in ("text", "reasoning"))
        told = self._fields(text, thoughts, self._calls()) | self._logprobs(answer.pieces)
        return self._schema(**_heading(self._body), **told, **self._figures())

    def step(self, step: Step) -> bytes:
        text, thoughts = step.output.text, ""
        if self._answer.reader:
            kinds = [block.kind for block in self._answer.blocks]
            text, thoughts = (
                "".join(text for place, text in step.deltas if kinds[place] == which)
                for which in ("text", "reasoning")
            )
        logprobs = self._logprobs(step.output.pieces)
        if not (text or thoughts or logprobs):
            return b""
        return self._line(text, thoughts, (), logprobs | {"done": False})

    def end(self) -> bytes:
        calls = self._calls()
        called = self._line("", "", calls, {"done": False}) if calls else b""
        return called + self._line("", "", (), self._figures())

    def _line(self, text: str, thoughts: str, calls: Calls, more: dict[str, Any]) -> bytes:
        told = _heading(self._body) | self._fields(text, thoughts, calls) | more
        line = dumps(told)
        for end in _LINE_ENDS:
            line = line.replace(end.encode(), rb"\u%04x" % ord(end))
        return line + b"\n"

    def _calls(self) -> Calls:
        called = [block for block in self._answer.blocks if block.kind == "call"]
        return [
            {
                "id": call_id(),
                "function": {
                    "index": index,
                    "name": block.name,
                    "arguments": arguments(block.text),
                },
            }
            for index, block in enumerate(called)
        ]

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        found = token_logprobs(pieces, self._engine.tokenizer)
        return {"logprobs": [token.model_dump() for token in found]} if found else {}

    def _tokens(self) -> list[int]:
        """Return the tokens of prompt and answer, without what ends the answer."""
        tokens = [piece.token for piece in self._answer.pieces]
        while tokens and not self._engine.tokenizer.decode(tokens[-1:]):
            tokens.pop()
        return [*self._answer.request.prompt_tokens, *tokens]

    def _figures(self) -> dict[str, Any]:
        """Return the fields of the end; a client divides by the durations, so none is 0."""
        answer = self._answer
        stats = answer.stats
        body = self._body
        goes_on = isinstance(body, OllamaPrompt) and not body.raw
        context = {"context": self._tokens()} if goes_on else {}
        return context | {
            "done": True,
            "done_reason": answer.finish_reason,
            "total_duration": _nanoseconds(time.monotonic() - self.job.arrival),
            "load_duration": 0,
            "prompt_eval_count": len(answer.request.prompt_tokens),
            "prompt_eval_duration": _nanoseconds(stats.prefill_seconds),
            "eval_count": stats.generated_tokens,
            "eval_duration": _nanoseconds(stats.decode_seconds),
        }


def _message(text: str, thoughts: str, calls: Calls) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["thinking"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def _response(text: str, thoughts: str, calls: Calls) -> dict[str, Any]:
    del calls  # a prompt has no tools
    return {"response": text} | ({"thinking": thoughts} if thoughts else {})


def _heading(body: OllamaRequest) -> dict[str, Any]:
    return {"model": body.called, "created_at": told_time(datetime.now(UTC))}


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))
