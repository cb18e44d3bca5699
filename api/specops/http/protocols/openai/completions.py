"""POST /v1/completions: continue prompts, in OpenAI's protocol."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field, model_validator

from specops.engine.engine import Engine
from specops.http.answering.prompt import Tokens, fill_in, mixed_tokens
from specops.http.answering.schema import (
    Integer,
    MixedPrompt,
    MostTokens,
    Text,
    absent,
    conflict,
    listed,
    names_of,
)
from specops.http.answering.submit import Prepared, check_model, generate
from specops.http.answering.writer import Answer, Generation, Step, token_name
from specops.http.protocol import Prompt, Protocol
from specops.http.protocols.openai.common import (
    MAX_CHOICES,
    MAX_LIKELY,
    RESPONSES,
    OpenAiRequest,
    OpenAiWriter,
    PromptLogprobs,
    Timings,
    Usage,
    timings,
    usage,
)
from specops.http.state import Ctx
from specops.request import Logprob, TokenOutput
from specops.text.detokenizer import IncrementalDetokenizer
from specops.text.fill_in import FimPrompt
from specops.text.tokenizer import Tokenizer

_DEFAULT_TOKENS = 16  # OpenAI's
Prompts = (
    Text
    | MixedPrompt
    | Annotated[list[Text | MixedPrompt], Field(min_length=1, max_length=MAX_CHOICES)]
)


class CompletionRequest(OpenAiRequest):
    """One or more prompts to continue, as text or tokens."""

    limit_field = "max_tokens"

    prompt: Prompts
    max_tokens: Integer = Field(
        _DEFAULT_TOKENS,
        ge=-2,
        validation_alias=names_of("max_tokens"),
        description="0: only compute the prompt; -1: as many as the server allows",
    )
    logprobs: Integer = Field(
        None,
        ge=0,
        le=MAX_LIKELY,
        description="report the probability of each token and of this many alternatives",
    )
    echo: bool | None = Field(False, description="begin the answer with the prompt")
    best_of: Integer = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="generate this many answers, and return the `n` with the highest mean "
        "log-probability",
    )
    truncate_prompt_tokens: MostTokens | None = Field(
        None, description="maximum tokens of a prompt; below 0: leave room for the answer"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="side on which to cut a prompt: `left` (default) or `right`"
    )
    suffix: Text | None = Field(None, description="the text after the answer")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.best_of is not None and self.best_of < self.returned:
            raise conflict("best_of", "must be at least `n`")
        if self.ranks and self.stream:
            raise conflict("best_of", "must be at most `n` where `stream` is true")
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                raise conflict("suffix", f"cannot be combined with `{name}`")
        return self

    @property
    def returned(self) -> int:
        """Number of answers returned for each prompt."""
        return self.n or 1

    @property
    def choices(self) -> int:
        """Number of answers generated for each prompt."""
        return self.best_of or self.returned

    @property
    def ranks(self) -> bool:
        """Whether only the best of the generated answers are returned."""
        return self.choices > self.returned

    @property
    def limit(self) -> int | None:
        """Maximum tokens of an answer; None: as many as the server allows."""
        limit = _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        return None if limit < 0 else limit

    @property
    def token_logprobs(self) -> int | None:
        """Number of likeliest tokens to report; ranking needs the chosen tokens' probabilities."""
        return 0 if self.ranks and self.logprobs is None else self.logprobs

    @property
    def prompt_top(self) -> int | None:
        """Number of likeliest tokens to report for each prompt token; None: nothing."""
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in wanted if count is not None), default=None)

    def truncated(self, tokens: Sequence[int], context: int) -> Tokens:
        """Truncate a prompt's tokens if requested; `context` is the model's, in tokens."""
        most = self.truncate_prompt_tokens
        if most is None:
            return tuple(tokens)
        most = context - min(context - 1, self.limit or 1) if most < 0 else most
        return tuple(tokens[:most] if self.truncation_side == "right" else tokens[-most:])

    @property
    def prompts(self) -> list[str | list[int | str]]:
        """The prompts as a list, even if there is only one."""
        return listed(self.prompt)


class CompletionLogprobs(BaseModel):
    """Natural logarithms of probabilities, one item per token of the text."""

    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for a prompt's first token")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="where the token begins in the choice's text")


class CompletionChoice(BaseModel):
    """One answer, or in a stream one step's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = Field(None, exclude_if=absent)


class Completion(BaseModel):
    """All answers; in a stream one step's parts, with the usage in the last event."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    timings: Timings | None = None


PATH = "/v1/completions"
router = APIRouter(tags=["openai"])
PROTOCOL = Protocol(
    router=router,
    prefixes=(PATH,),
    prompts={PATH: Prompt("prompt", "text_completion")},
)


@router.post(PATH, response_model=Completion, responses=RESPONSES)
async def completions(body: CompletionRequest, ctx: Ctx) -> Response:
    """Continue one or more prompts.

    With `stream` the answer is a series of server-sent events, each with the fields of the plain
    answer and the new text; the last one also has `timings`. With `include_usage`, a further one
    has these and `usage`, but no choices. `[DONE]` ends the stream.
    """
    engine = check_model(ctx, body.model or "")
    cuts = body.truncate_prompt_tokens is not None
    gap, prompts, suffix = fill_in(body.suffix, engine), body.prompts, body.suffix or ""

    def encode(prompt: str | list[int | str], behind: Sequence[int]) -> FimPrompt:
        if gap is None:
            tokens = mixed_tokens(prompt, engine, "prompt", any_length=cuts)
            return FimPrompt(body.truncated(tokens, engine.info.context), truncated=False)
        before = prompt if isinstance(prompt, str) else mixed_tokens(prompt, engine, "prompt")
        return gap.prompt(before, behind, engine.info.context)

    def prepare() -> Prepared:
        behind = gap.encode(suffix) if gap else ()  # once for all prompts
        return Prepared.of([encode(prompt, behind) for prompt in prompts], body.prompt, gap)

    generation = await generate(ctx, body, prepare, count=len(prompts))
    return await _Writer(generation, engine, body).response(stream=body.streams)


class _Writer(OpenAiWriter):
    def __init__(self, generation: Generation, engine: Engine, body: CompletionRequest) -> None:
        super().__init__(generation, engine, "cmpl", "text_completion", body)
        self._body: CompletionRequest = body
        self._texts = [
            _Text(engine.tokenizer, body, answer, body.prompts[index // generation.choices])
            for index, answer in enumerate(generation.answers)
        ]

    def whole(self) -> Completion:
        answers = self.generation.answers
        return Completion(
            **self.heading,
            choices=[
                CompletionChoice(
                    **self._texts[index].choice(
                        rank, answers[index].pieces, answers[index].finish_reason
                    )
                    | self.token_ids(index, answers[index].pieces),
                    prompt_logprobs=self.prompt_logprobs(index),
                )
                for rank, index in enumerate(self._returned())
            ],
            usage=usage(self.generation),
            timings=timings(self.generation.answers),
        )

    def step(self, step: Step) -> bytes:
        finish = self.generation.answers[step.index].finish_reason if step.output.finish else None
        index, pieces = step.index, step.output.pieces
        choice = self._texts[index].choice(index, pieces, finish)
        return self.chunk(choice | self.token_ids(index, pieces))

    def _returned(self) -> Sequence[int]:
        """Return the indexes of the returned answers: each prompt's best."""
        answers, body = self.generation.answers, self._body
        if not body.ranks:
            return range(len(answers))
        kept = []
        for first in range(0, len(answers), body.choices):
            indexes = range(first, first + body.choices)
            kept += sorted(indexes, key=lambda index: -_mean(answers[index]))[: body.returned]
        return kept


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
        prompt: str | list[int | str],
    ) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self._shows_logprobs = body.logprobs is not None
        tokens = len(body.logprob_tokens)
        self._top = 1 + tokens if tokens else body.logprobs or 0
        self._names_ids = bool(body.return_tokens_as_token_ids)
        self._length = 0  # of the text whose tokens have been reported
        self._prompt_reported = False
        self._echo = ""  # the beginning of the next choice's text
        self._spells = False  # whether the echo is decoded tokens, special ones included
        if body.echo:
            sent, whole = answer.request.prompt_tokens, body.truncate_prompt_tokens is None
            self._spells = not (isinstance(prompt, str) and whole)
            self._echo = tokenizer.decode(sent, special=True) if self._spells else str(prompt)

    def choice(self, index: int, pieces: Sequence[TokenOutput], finish: Any) -> dict[str, Any]:
        """Return a choice's fields, with these pieces' text and probabilities."""
        logprobs = self._logprobs(pieces) if self._shows_logprobs else None
        text, self._echo = self._echo + "".join([piece.text for piece in pieces]), ""
        # No pydantic model: it takes five times as long, and this runs in every step.
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, pieces: Sequence[TokenOutput]) -> dict[str, Any] | None:
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if not self._prompt_reported:
            self._report_prompt(logprobs)
        for piece in pieces:
            self._report(logprobs, piece.token, piece.logprob, len(piece.text))
        return logprobs.model_dump() if logprobs.tokens else None

    def _report_prompt(self, logprobs: CompletionLogprobs) -> None:
        """Report the prompt's tokens, which come with the first output."""
        self._prompt_reported = True
        tokens = self._answer.request.prompt_tokens
        text = IncrementalDetokenizer(self._tokenizer, ())
        for token, logprob in zip(tokens, self._answer.prompt, strict=False):
            shown = text.push(token)
            if self._spells and not self._tokenizer.shown_bytes(token):
                shown = self._tokenizer.spelling(token)[0]
            self._report(logprobs, token, logprob, len(shown))
        self._length = len(self._echo)

    def _report(
        self, logprobs: CompletionLogprobs, token: int, logprob: Logprob | None, length: int
    ) -> None:
        """Report a token that adds `length` characters to the text."""
        name = partial(token_name, tokenizer=self._tokenizer, as_id=self._names_ids)
        logprobs.tokens.append(name(token))
        logprobs.token_logprobs.append(None if logprob is None else logprob.chosen)
        # The chosen token is among them. If two tokens have the same spelling, the likelier stays.
        likely = logprob.top[: self._top] if logprob else ()
        top = None if logprob is None else [(token, logprob.chosen), *reversed(likely)]
        logprobs.top_logprobs.append(
            None if top is None else {name(item): value for item, value in top}
        )
        logprobs.text_offset.append(self._length)
        self._length += length
