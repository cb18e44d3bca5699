"""POST /v1/chat/completions: the assistant's next message, as OpenAI has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from specops.http.answers import json_answer
from specops.http.routes.conversation import Step, Talk, call_id, converse, said
from specops.http.routes.openai import RESPONSES, Heading, check_model, timings, usage
from specops.http.schemas.chat import (
    AnswerCall,
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    TokenLogprob,
    TopLogprob,
)
from specops.http.schemas.generate import stream_event
from specops.http.sse import PAUSE, EventStream
from specops.http.state import State
from specops.request import Piece
from specops.text.tokenizer import Tokenizer
from specops.text.tools.reader import Block

PATH = "/v1/chat/completions"
_DELTAS = {"text": "content", "reasoning": "reasoning_content"}
router = APIRouter(tags=["openai"])


@router.post(PATH, response_model=ChatCompletion, responses=RESPONSES)
async def chat_completions(body: ChatRequest, request: Request, state: State) -> Response:
    """Go on with a conversation.

    The model's own chat template makes a prompt of the messages. With `stream` the answer is a
    series of server-sent events with a `delta` in place of the message; the last one has no
    choices but `timings`, and `usage` where that was asked for; then `[DONE]`.
    """
    engine = check_model(body.model, state)
    talk = await converse(state, request, body, body.conversation())
    job = talk.job
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    heading = Heading("chatcmpl", kind, engine, include_usage=body.include_usage)
    if body.stream:
        stream = _stream(talk, heading, tokens=bool(body.return_tokens))
        return EventStream(stream, job.handle.cancel, job.headers)
    content = ChatCompletion(
        **heading.fields,
        choices=[
            ChatChoice(
                index=index,
                message=_message(blocks),
                logprobs=_logprobs(job.answers[index].pieces, engine.tokenizer),
                finish_reason=talk.finish_reason(index),
            )
            for index, blocks in enumerate(await talk.finished())
        ],
        usage=usage(job),
        timings=timings(job),
    )
    return json_answer(content, job.headers)


def _message(blocks: Sequence[Block]) -> AnswerMessage:
    calls = [
        AnswerCall(id=call_id(), function={"name": block.name, "arguments": block.text})
        for block in blocks
        if block.kind == "call"
    ]
    return AnswerMessage(
        content=said(blocks, "text") or (None if calls else ""),
        reasoning_content=said(blocks, "reasoning") or None,
        tool_calls=calls or None,
    )


async def _stream(talk: Talk, heading: Heading, *, tokens: bool) -> AsyncGenerator[bytes, None]:
    job, tokenizer = talk.job, talk.engine.tokenizer
    begun: set[int] = set()
    async for step in talk.steps():
        if step is None:
            yield PAUSE
            continue
        index = step.index
        if index not in begun:
            begun.add(index)
            yield heading.chunk(job, _choice(index, {"role": "assistant", "content": ""}))
        told = _logprobs(step.output.pieces, tokenizer)
        deltas = list(_deltas(step, talk))
        shown = stream_event(step.output)["tokens"] if tokens else []
        if (told or shown) and not deltas:  # of text that is held back
            deltas = [{"content": ""}]
        for delta in deltas:
            choice = _choice(index, delta, logprobs=told)
            yield heading.chunk(job, choice | {"tokens": shown} if shown else choice)
            told, shown = None, []
        if step.output.finish:
            finish = talk.finish_reason(index)
            yield heading.chunk(job, _choice(index, {}, finish=finish))
    yield heading.end(job)


def _deltas(step: Step, talk: Talk) -> Iterator[dict[str, Any]]:
    """A step's news as OpenAI writes it: of a call the name first, then pieces of its arguments."""
    blocks = talk.blocks(step.index)
    for place, text in step.deltas:
        block = blocks[place]
        if block.kind != "call":
            yield {_DELTAS[block.kind]: text}
            continue
        number = sum(other.kind == "call" for other in blocks[:place])
        call: dict[str, Any] = {"index": number, "function": {"arguments": text}}
        if not text:
            call |= {"id": call_id(), "type": "function"}
            call["function"]["name"] = block.name
        yield {"tool_calls": [call]}


def _choice(
    index: int,
    delta: dict[str, Any],
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
