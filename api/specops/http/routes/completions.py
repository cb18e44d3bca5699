"""POST /v1/completions: continue prompts, as OpenAI has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from specops.engine.engine import Engine
from specops.http.answers import json_answer
from specops.http.choosing import prompt_tokens
from specops.http.routes.job import Job, Prompts, output_limit, start
from specops.http.routes.openai import RESPONSES, Heading, check_model, timings, usage
from specops.http.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from specops.http.sse import PAUSE, EventStream
from specops.http.state import State
from specops.request import Piece
from specops.text.tokenizer import Tokenizer

_DEFAULT_TOKENS = 16  # OpenAI's
PATH = "/v1/completions"
router = APIRouter(tags=["openai"])


@router.post(PATH, response_model=Completion, responses=RESPONSES)
async def completions(body: CompletionRequest, request: Request, state: State) -> Response:
    """Continue one or several prompts.

    With `stream` the answer is a series of server-sent events, each with the fields of the plain
    answer and the new text; the last one has no choices but `timings`, and `usage` where that was
    asked for; then `[DONE]`.
    """
    engine = check_model(body.model, state)
    prompts = body.prompts
    job = await start(
        state,
        request,
        body,
        Prompts(
            lambda engine: [prompt_tokens(prompt, engine, "prompt") for prompt in prompts],
            len(prompts),
            sum(map(len, prompts)),
            body.prompt,
        ),
        sampling=body.sampling,
        choices=body.choices,
        max_new_tokens=output_limit(
            body.max_tokens, "max_tokens", state.settings, default=_DEFAULT_TOKENS
        ),
        stop=body.stops,
        stream=bool(body.stream),
        logprobs=body.logprobs,
    )
    answers = [_Text(engine.tokenizer, echo) for echo in _echoes(body, engine)]
    heading = Heading("cmpl", "text_completion", engine, include_usage=body.include_usage)
    if body.stream:
        return EventStream(_stream(job, heading, answers), job.handle.cancel, job.headers)
    content = Completion(
        **heading.fields,
        choices=[
            text.choice(index, answer.pieces, answer.finish_reason)
            for index, (answer, text) in enumerate(zip(await job.finished(), answers, strict=True))
        ],
        usage=usage(job),
        timings=timings(job),
    )
    return json_answer(content, job.headers)


async def _stream(job: Job, heading: Heading, texts: list[_Text]) -> AsyncGenerator[bytes, None]:
    async for item in job.outputs():
        if item is None:
            yield PAUSE
            continue
        index, output = item
        finish = job.answers[index].finish_reason if output.finish else None
        choice = texts[index].choice(index, output.pieces, finish)
        yield heading.chunk(job, choice.model_dump())
    yield heading.end(job)


def _echoes(body: CompletionRequest, engine: Engine) -> list[str]:
    """What each choice's text begins with."""
    if not body.echo:
        return [""] * (len(body.prompts) * body.choices)
    texts = [
        prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)
        for prompt in body.prompts
    ]
    return [text for text in texts for _ in range(body.choices)]


class _Text:
    """One choice's text so far.

    Args:
        tokenizer: spells tokens.
        echo: what the text begins with.
    """

    def __init__(self, tokenizer: Tokenizer, echo: str) -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._length = 0  # of the text without the echo

    def choice(self, index: int, pieces: Sequence[Piece], finish: Any) -> CompletionChoice:
        """Return what these pieces add."""
        text, self._echo = self._echo + "".join(piece.text for piece in pieces), ""
        return CompletionChoice(
            index=index, text=text, logprobs=self._logprobs(pieces), finish_reason=finish
        )

    def _logprobs(self, pieces: Sequence[Piece]) -> CompletionLogprobs | None:
        """Offsets are in the text without the echo, which never comes with probabilities."""
        told = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for piece in pieces:
            if piece.logprob is None:
                return None
            told.tokens.append(self._tokenizer.spelling(piece.token)[0])
            told.token_logprobs.append(piece.logprob.chosen)
            top = reversed(piece.logprob.top)  # of two with the same spelling the likelier stays
            told.top_logprobs.append(
                {self._tokenizer.spelling(token)[0]: value for token, value in top}
            )
            told.text_offset.append(self._length)
            self._length += len(piece.text)
        return told if told.tokens else None
