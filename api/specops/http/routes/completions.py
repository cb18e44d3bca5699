"""POST /v1/completions: continue prompts, as OpenAI has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from specops.engine.engine import Engine
from specops.http.answers import json_answer
from specops.http.choosing import fill_in, prompt_tokens
from specops.http.routes.job import Answer, Job, Prompts, Tokens, output_limit, start
from specops.http.routes.openai import RESPONSES, Heading, check_model, timings, usage
from specops.http.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from specops.http.schemas.openai import Usage
from specops.http.sse import PAUSE, EventStream
from specops.http.state import State
from specops.request import Logprob, Piece
from specops.text.detokenizer import IncrementalDetokenizer
from specops.text.fill_in import FillIn
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
    gap = fill_in(body.suffix, engine)
    prompts = body.prompts
    best = body.drawn_choices > body.choices
    job = await start(
        state,
        request,
        body,
        Prompts(
            lambda engine: [_encoded(prompt, body, gap, engine) for prompt in prompts],
            len(prompts),
            sum(map(len, prompts)) + len(prompts) * len(body.suffix or ""),
            body.prompt,
        ),
        sampling=body.sampling,
        choices=body.drawn_choices,
        max_new_tokens=output_limit(
            body.max_tokens, "max_tokens", state.settings, default=_DEFAULT_TOKENS
        )
        or 1,
        stop=(*body.stops, *(gap.ends if gap else ())),
        stop_token_ids=(*(body.stop_token_ids or ()), *(gap.ends.values() if gap else ())),
        stream=bool(body.stream),
        logprobs=0 if best and body.logprobs is None else body.logprobs,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
    )
    texts = [
        _Text(engine.tokenizer, body, answer, echo) for answer, echo in _echoes(body, job, engine)
    ]
    heading = Heading("cmpl", "text_completion", engine, include_usage=body.include_usage)
    if body.stream:
        return EventStream(_stream(job, heading, texts), job.handle.cancel, job.headers)
    answers = await job.finished()
    chosen = _best(answers, body) if best else range(len(answers))
    content = Completion(
        **heading.fields,
        choices=[
            texts[place].choice(index, answers[place].pieces, answers[place].finish_reason)
            for index, place in enumerate(chosen)
        ],
        usage=_usage(job, body),
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


def _encoded(
    prompt: str | list[int], body: CompletionRequest, gap: FillIn | None, engine: Engine
) -> Tokens:
    if gap is None:
        return prompt_tokens(prompt, engine, "prompt")
    before = prompt if isinstance(prompt, str) else prompt_tokens(prompt, engine, "prompt")
    return gap.prompt(before, body.suffix or "")


def _usage(job: Job, body: CompletionRequest) -> Usage:
    """Count the tokens; one that is generated where none was asked for does not count."""
    counted = usage(job)
    if body.max_tokens == 0:
        counted.completion_tokens, counted.total_tokens = 0, counted.prompt_tokens
    return counted


def _best(answers: Sequence[Answer], body: CompletionRequest) -> list[int]:
    """Places of each prompt's best answers, the best one first."""
    found = []
    for first in range(0, len(answers), body.drawn_choices):
        places = range(first, first + body.drawn_choices)
        found += sorted(places, key=lambda place: -_mean(answers[place]))[: body.choices]
    return found


def _mean(answer: Answer) -> float:
    """Log-probability per token."""
    told = [piece.logprob.chosen for piece in answer.pieces if piece.logprob]
    return sum(told) / max(1, len(told))


def _echoes(body: CompletionRequest, job: Job, engine: Engine) -> Iterator[tuple[Answer, str]]:
    """The answers, each with what its text begins with."""
    for index, answer in enumerate(job.answers):
        prompt = body.prompts[index // job.choices]
        if not body.echo:
            prompt = ""
        yield answer, prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)


class _Text:
    """One choice's text so far.

    Args:
        echo: what the text begins with.
    """

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionRequest, answer: Answer, echo: str
    ) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._echo = echo
        self._silent = body.max_tokens == 0  # the engine generates a token all the same
        self._told = body.logprobs is not None
        self._length = 0  # of the text so far
        self._prompt_told = False

    def choice(self, index: int, pieces: Sequence[Piece], finish: Any) -> CompletionChoice:
        """Return what these pieces add."""
        told = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if self._told and not self._prompt_told:
            self._tell_prompt(told)
        if self._silent:
            pieces = ()
        text, self._echo = self._echo + "".join(piece.text for piece in pieces), ""
        for piece in pieces if self._told else ():
            self._tell(told, piece.token, piece.logprob, len(piece.text))
        return CompletionChoice(
            index=index, text=text, logprobs=told if told.tokens else None, finish_reason=finish
        )

    def _tell_prompt(self, told: CompletionLogprobs) -> None:
        """Tell the prompt's tokens, which come with the first output; offsets begin with them."""
        self._prompt_told = True
        tokens, text = (
            self._answer.request.prompt_tokens,
            IncrementalDetokenizer(self._tokenizer, ()),
        )
        for token, logprob in zip(tokens, self._answer.prompt, strict=False):
            self._tell(told, token, logprob, len(text.push(token)))
        self._length = len(self._echo)

    def _tell(
        self, told: CompletionLogprobs, token: int, logprob: Logprob | None, length: int
    ) -> None:
        """Tell a token that adds so many characters to the text."""
        spelling = self._tokenizer.spelling
        told.tokens.append(spelling(token)[0])
        told.token_logprobs.append(None if logprob is None else logprob.chosen)
        # Of two with the same spelling the likelier stays.
        top = None if logprob is None else reversed(logprob.top)
        told.top_logprobs.append(
            None if top is None else {spelling(token)[0]: value for token, value in top}
        )
        told.text_offset.append(self._length)
        self._length += length
