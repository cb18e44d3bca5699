"""POST /v1/chat/completions: the assistant's next message, in OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Response

from specops.engine.engine import Engine
from specops.http.answering.conversation import call_id, converse, joined_text
from specops.http.answering.job import Job, Step
from specops.http.answering.logprobs import token_logprobs
from specops.http.routes.openai import RESPONSES, OpenAiWriter, check_model, timings, usage
from specops.http.schemas.chat import (
    AnswerCall,
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
)
from specops.http.schemas.generate import stream_event
from specops.http.state import Ctx
from specops.request import Piece
from specops.text.tools.reader import Block

PATH = "/v1/chat/completions"
_DELTAS = {"text": "content", "reasoning": "reasoning_content"}
router = APIRouter(tags=["openai"])


@router.post(PATH, response_model=ChatCompletion, responses=RESPONSES)
async def chat_completions(body: ChatRequest, ctx: Ctx) -> Response:
    """Continue a conversation.

    The model's own chat template makes a prompt of the messages. With `stream` the answer is a
    series of server-sent events with a `delta` in place of the message; the last one has no
    choices but `timings`, and `usage` if the client asked for it; then `[DONE]`.
    """
    engine = check_model(ctx, body.model)
    job = await converse(ctx, body, body.conversation)
    return await _Writer(job, engine, body).response(stream=body.streams)


class _Writer(OpenAiWriter):
    def __init__(self, job: Job, engine: Engine, body: ChatRequest) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(job, engine, "chatcmpl", kind, include_usage=body.include_usage)
        self._shows_tokens = bool(body.return_tokens)
        self._begun: set[int] = set()

    def whole(self) -> ChatCompletion:
        return ChatCompletion(
            **self.heading,
            choices=[
                ChatChoice(
                    index=index,
                    message=_message(answer.blocks),
                    logprobs=self._logprobs(answer.pieces),
                    finish_reason=answer.chat_finish_reason,
                )
                for index, answer in enumerate(self.job.answers)
            ],
            usage=usage(self.job),
            timings=timings(self.job),
        )

    def step(self, step: Step) -> bytes:
        index, events = step.index, b""
        if index not in self._begun:
            self._begun.add(index)
            events += self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
        logprobs = self._logprobs(step.output.pieces)
        deltas = list(self._deltas(step))
        tokens = stream_event(step.output)["tokens"] if self._shows_tokens else []
        if (logprobs or tokens) and not deltas:  # the text of these tokens is held back
            deltas = [{"content": ""}]
        for delta in deltas:
            events += self._chunk(index, delta, logprobs, tokens)
            logprobs, tokens = None, []
        if step.output.finish:
            finish = self.job.answers[index].chat_finish_reason
            events += self._chunk(index, {}, finish=finish)
        return events

    def _deltas(self, step: Step) -> Iterator[dict[str, Any]]:
        """Yield a step's news in OpenAI's form: a call's name first, then pieces of arguments."""
        blocks = self.job.answers[step.index].blocks
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

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: ChatLogprobs | None = None,
        tokens: Sequence[dict[str, Any]] = (),
        finish: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs and logprobs.model_dump(),
            "finish_reason": finish,
        }
        return self.chunk(choice | {"tokens": tokens} if tokens else choice)

    def _logprobs(self, pieces: Sequence[Piece]) -> ChatLogprobs | None:
        """Return the tokens' probabilities; None without tokens or if nobody asked for them."""
        content = token_logprobs(pieces, self.engine.tokenizer)
        return ChatLogprobs(content=content) if content else None


def _message(blocks: Sequence[Block]) -> AnswerMessage:
    calls = [
        AnswerCall(id=call_id(), function={"name": block.name, "arguments": block.text})
        for block in blocks
        if block.kind == "call"
    ]
    return AnswerMessage(
        content=joined_text(blocks, "text") or (None if calls else ""),
        reasoning_content=joined_text(blocks, "reasoning") or None,
        tool_calls=calls or None,
    )
