"""POST /v1/chat/completions: the assistant's next message, as OpenAI has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from specops.engine.engine import Engine
from specops.http.errors import InvalidField
from specops.http.routes.job import Job, Prompts, Tokens, output_limit, start
from specops.http.routes.openai import RESPONSES, Heading, check_model, timings, usage
from specops.http.schemas.chat import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    TokenLogprob,
    TopLogprob,
)
from specops.http.sse import PAUSE, EventStream
from specops.http.state import State
from specops.request import Piece
from specops.text.chat_template import ChatTemplateError
from specops.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
router = APIRouter(tags=["openai"])


@router.post(PATH, response_model=ChatCompletion, responses=RESPONSES)
async def chat_completions(body: ChatRequest, request: Request, state: State) -> Response:
    """Go on with a conversation.

    The model's own chat template makes a prompt of the messages. With `stream` the answer is a
    series of server-sent events with a `delta` in place of the message; the last one has no
    choices but `timings`, and `usage` where that was asked for; then `[DONE]`.
    """
    engine = check_model(body.model, state)
    messages = [message.for_template() for message in body.messages]
    field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    job = await start(
        state,
        request,
        body,
        Prompts(
            lambda engine: [_encode(messages, engine)],
            1,
            sum(len(message["content"]) for message in messages),
            messages,
        ),
        sampling=body.sampling,
        choices=body.choices,
        max_new_tokens=output_limit(
            getattr(body, field), field, state.settings, default=state.settings.max_new_tokens
        ),
        stop=body.stops,
        stream=bool(body.stream),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    heading = Heading("chatcmpl", kind, engine, include_usage=body.include_usage)
    if body.stream:
        stream = _stream(job, heading, engine.tokenizer)
        return EventStream(stream, job.handle.cancel, job.headers)
    content = ChatCompletion(
        **heading.fields,
        choices=[
            ChatChoice(
                index=index,
                message=AnswerMessage(content=answer.text),
                logprobs=_logprobs(answer.pieces, engine.tokenizer),
                finish_reason=answer.finish_reason,
            )
            for index, answer in enumerate(await job.finished())
        ],
        usage=usage(job),
        timings=timings(job),
    )
    return Response(content.model_dump_json(), headers=job.headers, media_type="application/json")


async def _stream(job: Job, heading: Heading, tokenizer: Tokenizer) -> AsyncGenerator[bytes, None]:
    begun: set[int] = set()
    async for item in job.outputs():
        if item is None:
            yield PAUSE
            continue
        index, output = item
        if index not in begun:
            begun.add(index)
            yield heading.chunk(job, _choice(index, {"role": "assistant", "content": ""}))
        if output.pieces:
            told = _logprobs(output.pieces, tokenizer)
            yield heading.chunk(job, _choice(index, {"content": output.text}, logprobs=told))
        if output.finish:
            finish = job.answers[index].finish_reason
            yield heading.chunk(job, _choice(index, {}, finish=finish))
    yield heading.end(job)


def _choice(
    index: int,
    delta: dict[str, str],
    *,
    logprobs: ChatLogprobs | None = None,
    finish: str | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs and logprobs.model_dump(),
        "finish_reason": finish,
    }


def _encode(messages: list[dict[str, str]], engine: Engine) -> Tokens:
    try:
        return engine.encode_chat(messages)
    except ChatTemplateError as error:
        code = "invalid_value" if engine.chat_template else "no_chat_template"
        raise InvalidField("messages", str(error), code=code) from error


def _logprobs(pieces: Sequence[Piece], tokenizer: Tokenizer) -> ChatLogprobs | None:
    """Tell the tokens' probabilities; None where they were not asked for."""
    told = []
    for piece in pieces:
        if piece.logprob is None:
            return None
        top = [_top(token, value, tokenizer) for token, value in piece.logprob.top]
        chosen = _top(piece.token, piece.logprob.chosen, tokenizer)
        told.append(TokenLogprob(**chosen.model_dump(), top_logprobs=top))
    return ChatLogprobs(content=told)


def _top(token: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    text, encoded = tokenizer.spelling(token)
    return TopLogprob(token=text, logprob=logprob, bytes=list(encoded))
