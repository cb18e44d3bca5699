"""Ollama's endpoints: POST /api/chat, /api/generate, /api/embed, and those about models.

A stream is a line of JSON per step. The served model is always loaded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response

from specops.engine.engine import Engine
from specops.http.answering.choosing import fill_in
from specops.http.answering.conversation import arguments, converse, joined_text
from specops.http.answering.job import Job, Step
from specops.http.answering.submit import start
from specops.http.answering.unknown import ignore_unknown, ignored_header
from specops.http.answering.writer import Writer, json_answer
from specops.http.errors import GENERATING, OllamaErrorResponse, Responses, error_responses
from specops.http.routes.embeddings import embed, vectors_answer
from specops.http.routes.openai import check_model, fingerprint
from specops.http.schemas.ollama import (
    OllamaChat,
    OllamaChatReply,
    OllamaName,
    OllamaPrompt,
    OllamaPromptReply,
    OllamaReply,
    OllamaTexts,
    OllamaVectors,
)
from specops.http.state import AppState, State
from specops.text.fill_in import FillIn
from specops.text.json_values import dumps
from specops.text.tools.reader import Block

CHAT_PATH, PROMPT_PATH, EMBED_PATH = "/api/chat", "/api/generate", "/api/embed"
_PROTOCOL = "0.12.0"  # the version of Ollama's API: clients ask for a minimum
_FOREVER = "9999-12-31T23:59:59Z"  # a model is never unloaded
# Ollama's client for Python ends a line at each of these. They stand in texts only.
_LINE_ENDS = "\u0085\u2028\u2029"
_ARCHITECTURE = "specops"  # prefix of the keys of `model_info`
_ERRORS = error_responses(*GENERATING, 404, model=OllamaErrorResponse)
_MODEL_ERRORS = error_responses(401, 500, 503, model=OllamaErrorResponse)
_LINES: Responses = {200: {"content": {"application/x-ndjson": {}}}}
# The answer to an empty request: clients send one to have a model loaded.
_LOADED: dict[str, Any] = {"done": True, "done_reason": "load"}
router = APIRouter(tags=["ollama"])

Calls = Sequence[dict[str, Any]]
Fields = Callable[[str, str, Calls], dict[str, Any]]  # of a reply, from text, thoughts and calls


@router.post(CHAT_PATH, response_model=OllamaChatReply, responses=_LINES | _ERRORS)
async def chat(body: OllamaChat, request: Request, state: State) -> Response:
    """Continue a conversation.

    With `stream`, which is the default, the answer is a line of JSON per step; the last one has
    the figures.
    """
    engine = _served(body.model, state)
    if not body.messages:
        ignore_unknown(body, request, state.settings)
        reply = OllamaChatReply(**_heading(engine), **_message("", "", ()), **_LOADED)
        return json_answer(reply, ignored_header(request), exclude_none=True)
    job = await converse(state, request, body, body.conversation)
    return await _Writer(job, engine, OllamaChatReply, _message).response(stream=body.streams)


@router.post(PROMPT_PATH, response_model=OllamaPromptReply, responses=_LINES | _ERRORS)
async def generate(body: OllamaPrompt, request: Request, state: State) -> Response:
    """Answer a prompt; with `raw`, or where the model is no chat model, continue it."""
    engine = _served(body.model, state)
    if not (body.prompt or body.suffix):
        ignore_unknown(body, request, state.settings)
        reply = OllamaPromptReply(**_heading(engine), response="", **_LOADED)
        return json_answer(reply, ignored_header(request), exclude_none=True)
    if not (body.raw or body.suffix) and (engine.info.chat or body.system):
        job = await converse(state, request, body, body.conversation)
    else:
        gap, prompt, suffix = fill_in(body.suffix, engine), body.prompt, body.suffix or ""
        job = await start(
            state,
            request,
            body,
            lambda: [gap.prompt(prompt, suffix) if gap else engine.encode(prompt)],
            size=len(prompt) + len(suffix),
            shown=prompt,
            gap=gap,
        )
    writer = _Writer(job, engine, OllamaPromptReply, _response)
    return await writer.response(stream=body.streams)


@router.post(EMBED_PATH, response_model=OllamaVectors, responses=_ERRORS)
async def embeddings(body: OllamaTexts, request: Request, state: State) -> Response:
    """Embed one or several texts: the mean of the model's last hidden states, of length 1."""
    engine = _served(body.model, state)
    ignore_unknown(body, request, state.settings)
    room = engine.info.context - 1 if body.truncate is not False else None
    job, vectors, tokens = await embed(
        state, request, engine, body.inputs, body.input, size=body.dimensions, room=room
    )
    figures = OllamaVectors(
        model=engine.info.name,
        embeddings=[],
        total_duration=_nanoseconds(time.monotonic() - job.arrival),
        prompt_eval_count=tokens,
    )
    rest = figures.model_dump(exclude={"embeddings"})
    return vectors_answer("embeddings", vectors, lambda _, vector: vector, rest, job.headers)


@router.get("/api/version", responses=error_responses(401, 500, model=OllamaErrorResponse))
async def version() -> dict[str, str]:
    """Return the version of Ollama whose API this is."""
    return {"version": _PROTOCOL}


@router.get("/api/tags", responses=_MODEL_ERRORS)
async def tags(state: State) -> dict[str, list[dict[str, Any]]]:
    """List the model that is loaded."""
    return {"models": [_model(state.service.engine, state)]}


@router.get("/api/ps", responses=_MODEL_ERRORS)
async def running(state: State) -> dict[str, list[dict[str, Any]]]:
    """List the model that is loaded, with its context length."""
    engine = state.service.engine
    more = {"expires_at": _FOREVER, "size_vram": 0, "context_length": engine.info.context}
    return {"models": [_model(engine, state) | more]}


@router.post("/api/show", responses=_ERRORS)
async def show(
    body: OllamaName, request: Request, response: Response, state: State
) -> dict[str, Any]:
    """Describe the model that is loaded, and its capabilities."""
    engine = _served(body.model, state)
    ignore_unknown(body, request, state.settings)
    response.headers.update(ignored_header(request))
    info, template = engine.info, engine.chat_template
    capabilities = {
        "completion": True,
        "tools": bool(template and template.calls),
        "thinking": bool(template and template.thinking),
        "insert": FillIn.of(engine.tokenizer) is not None,
        "embedding": bool(info.embedding_size),
    }
    return {
        "modified_at": _loaded_since(state),
        "parameters": "\n".join(f"{name} {value:g}" for name, value in info.sampling.told.items()),
        "details": _details(engine),
        "model_info": {
            "general.architecture": _ARCHITECTURE,
            "general.parameter_count": info.parameters,
            f"{_ARCHITECTURE}.context_length": info.context,
            f"{_ARCHITECTURE}.embedding_length": info.embedding_size,
        },
        "capabilities": [name for name, there in capabilities.items() if there],
    }


def _served(name: str, state: AppState) -> Engine:
    """Return the engine of the model that the client asks for, with or without `:latest`."""
    return check_model(name.removesuffix(":latest"), state)


class _Writer(Writer):
    media_type = "application/x-ndjson"
    pause = b""  # a line of JSON has no comments
    exclude_none = True

    def __init__(self, job: Job, engine: Engine, schema: type[OllamaReply], fields: Fields) -> None:
        super().__init__(job)
        self._engine = engine
        self._schema = schema
        self._fields = fields
        (self._answer,) = job.answers

    def whole(self) -> OllamaReply:
        answer = self._answer
        text, thoughts = answer.text, ""
        if answer.reader:
            text, thoughts = (joined_text(answer.blocks, kind) for kind in ("text", "reasoning"))
        told = self._fields(text, thoughts, _calls(answer.blocks))
        return self._schema(**_heading(self._engine), **told, **self._figures())

    def step(self, step: Step) -> bytes:
        text, thoughts = step.output.text, ""
        if self._answer.reader:
            kinds = [block.kind for block in self._answer.blocks]
            text, thoughts = (
                "".join(text for place, text in step.deltas if kinds[place] == which)
                for which in ("text", "reasoning")
            )
        return self._line(text, thoughts, (), {"done": False}) if text or thoughts else b""

    def end(self) -> bytes:
        calls = _calls(self._answer.blocks)
        called = self._line("", "", calls, {"done": False}) if calls else b""
        return called + self._line("", "", (), self._figures())

    def _line(self, text: str, thoughts: str, calls: Calls, more: dict[str, Any]) -> bytes:
        told = _heading(self._engine) | self._fields(text, thoughts, calls) | more
        line = dumps(told)
        for end in _LINE_ENDS:
            line = line.replace(end.encode(), rb"\u%04x" % ord(end))
        return line + b"\n"

    def _figures(self) -> dict[str, Any]:
        """Return the fields of the end; a client divides by the durations, so none is 0."""
        answer = self._answer
        stats = answer.stats
        return {
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


def _heading(engine: Engine) -> dict[str, Any]:
    return {"model": engine.info.name, "created_at": datetime.now(UTC).isoformat()}


def _calls(blocks: Sequence[Block]) -> Calls:
    return [
        {"function": {"name": block.name, "arguments": arguments(block.text)}}
        for block in blocks
        if block.kind == "call"
    ]


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))


def _model(engine: Engine, state: AppState) -> dict[str, Any]:
    name = engine.info.name
    return {
        "name": name,
        "model": name,
        "modified_at": _loaded_since(state),
        "size": engine.info.weight_bytes,
        # Clients show the beginning of the digest. It changes when a seed's output may change.
        "digest": hashlib.sha256(fingerprint(engine).encode()).hexdigest(),
        "details": _details(engine),
    }


def _loaded_since(state: AppState) -> str:
    return datetime.fromtimestamp(state.started, UTC).isoformat()


def _details(engine: Engine) -> dict[str, Any]:
    info = engine.info
    return {
        "parent_model": "",
        "format": "onnx",
        "family": _ARCHITECTURE,
        "families": [_ARCHITECTURE],
        "parameter_size": f"{info.parameters / 1e6:.1f}M",
        "quantization_level": info.quant,
    }
