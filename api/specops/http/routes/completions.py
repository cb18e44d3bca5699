"""POST /v1/completions: continue prompts, in OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Response

from specops.engine.engine import Engine
from specops.http.answering.choosing import fill_in, prompt_tokens
from specops.http.answering.job import Answer, Job, Step
from specops.http.answering.submit import Tokens, start
from specops.http.routes.openai import RESPONSES, OpenAiWriter, check_model, timings, usage
from specops.http.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from specops.http.schemas.openai import Usage
from specops.http.state import Ctx
from specops.request import Logprob, Piece
from specops.text.detokenizer import IncrementalDetokenizer
from specops.text.tokenizer import Tokenizer

PATH = "/v1/completions"
router = APIRouter(tags=["openai"])


@router.post(PATH, response_model=Completion, responses=RESPONSES)
async def completions(body: CompletionRequest, ctx: Ctx) -> Response:
    """Continue one or several prompts.

    With `stream` the answer is a series of server-sent events, each with the fields of the plain
    answer and the new text; the last one has no choices but `timings`, and `usage` if the client
    asked for it; then `[DONE]`.
    """
    engine = check_model(ctx, body.model)
    gap, prompts, suffix = fill_in(body.suffix, engine), body.prompts, body.suffix or ""

    def encoded(prompt: str | list[int]) -> Tokens:
        if gap is None:
            return prompt_tokens(prompt, engine, "prompt")
        before = prompt if isinstance(prompt, str) else prompt_tokens(prompt, engine, "prompt")
        return gap.prompt(before, suffix)

    job = await start(
        ctx,
        body,
        lambda: [encoded(prompt) for prompt in prompts],
        size=sum(map(len, prompts)) + len(prompts) * len(suffix),
        shown=body.prompt,
        count=len(prompts),
        gap=gap,
        prompt_logprobs=bool(body.echo) and body.logprobs is not None,
    )
    return await _Writer(job, engine, body).response(stream=body.streams)


class _Writer(OpenAiWriter):
    def __init__(self, job: Job, engine: Engine, body: CompletionRequest) -> None:
        include_usage = body.include_usage
        super().__init__(job, engine, "cmpl", "text_completion", include_usage=include_usage)
        self._body = body
        self._texts = [
            _Text(engine.tokenizer, body, answer, body.prompts[index // job.choices])
            for index, answer in enumerate(job.answers)
        ]

    def whole(self) -> Completion:
        answers = self.job.answers
        return Completion(
            **self.heading,
            choices=[
                self._texts[place].choice(
                    index, answers[place].pieces, answers[place].finish_reason
                )
                for index, place in enumerate(self._returned())
            ],
            usage=self._usage(),
            timings=timings(self.job),
        )

    def step(self, step: Step) -> bytes:
        finish = self.job.answers[step.index].finish_reason if step.output.finish else None
        choice = self._texts[step.index].choice(step.index, step.output.pieces, finish)
        return self.chunk(choice.model_dump())

    def _returned(self) -> Sequence[int]:
        """Return the places of the answers that the client gets: the best ones of each prompt."""
        answers, body = self.job.answers, self._body
        if not body.ranks:
            return range(len(answers))
        found = []
        for first in range(0, len(answers), body.choices):
            places = range(first, first + body.choices)
            found += sorted(places, key=lambda place: -_mean(answers[place]))[: body.returned]
        return found

    def _usage(self) -> Usage:
        counted = usage(self.job)
        if self._body.max_tokens == 0:  # the engine generates a token all the same
            counted.completion_tokens, counted.total_tokens = 0, counted.prompt_tokens
        return counted


def _mean(answer: Answer) -> float:
    """Return the mean log-probability of an answer's tokens."""
    chosen = [piece.logprob.chosen for piece in answer.pieces if piece.logprob]
    return sum(chosen) / max(1, len(chosen))


class _Text:
    """One choice's text so far."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionRequest,
        answer: Answer,
        prompt: str | Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._silent = body.max_tokens == 0  # the engine generates a token all the same
        self._shows_logprobs = body.logprobs is not None
        self._length = 0  # of the text whose tokens have been reported
        self._prompt_reported = False
        self._echo = ""  # text that the next choice begins with
        if body.echo:
            self._echo = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)

    def choice(self, index: int, pieces: Sequence[Piece], finish: Any) -> CompletionChoice:
        """Return the choice with the text and the probabilities of these pieces."""
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if self._shows_logprobs and not self._prompt_reported:
            self._report_prompt(logprobs)
        if self._silent:
            pieces = ()
        text, self._echo = self._echo + "".join(piece.text for piece in pieces), ""
        for piece in pieces if self._shows_logprobs else ():
            self._report(logprobs, piece.token, piece.logprob, len(piece.text))
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs if logprobs.tokens else None,
            finish_reason=finish,
        )

    def _report_prompt(self, logprobs: CompletionLogprobs) -> None:
        """Report the prompt's tokens, which come with the first output."""
        self._prompt_reported = True
        tokens = self._answer.request.prompt_tokens
        text = IncrementalDetokenizer(self._tokenizer, ())
        for token, logprob in zip(tokens, self._answer.prompt, strict=False):
            self._report(logprobs, token, logprob, len(text.push(token)))
        self._length = len(self._echo)

    def _report(
        self, logprobs: CompletionLogprobs, token: int, logprob: Logprob | None, length: int
    ) -> None:
        """Report a token that adds `length` characters to the text."""
        spelling = self._tokenizer.spelling
        logprobs.tokens.append(spelling(token)[0])
        logprobs.token_logprobs.append(None if logprob is None else logprob.chosen)
        # Of two tokens with the same spelling the likelier one stays.
        top = None if logprob is None else reversed(logprob.top)
        logprobs.top_logprobs.append(
            None if top is None else {spelling(item)[0]: value for item, value in top}
        )
        logprobs.text_offset.append(self._length)
        self._length += length
