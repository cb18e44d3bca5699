"""llama-server's protocol, for editor plug-ins: /infill, /completion, /props and /slots.

llama.vim and llama.vscode ask /infill for suggestions at the cursor. They send chunks of other
files in advance with `n_predict` 0, so that the server has computed them when they are needed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import exp, inf
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, BeforeValidator, Field

from specops.engine.engine import Engine
from specops.http.answering.prompt import mixed_tokens
from specops.http.answering.schema import (
    NEVER,
    Body,
    Integer,
    Items,
    LlamaOptions,
    MixedPrompt,
    ReportingOptions,
    Text,
    Unsupported,
    absent,
    listed,
    names_of,
)
from specops.http.answering.submit import Prepared, check_model, fingerprint, generate
from specops.http.answering.writer import Answer, Generation, Step, Writer
from specops.http.errors import ApiError, error_responses
from specops.http.protocol import Prompt, Protocol
from specops.http.protocols.openai.common import MAX_CHOICES, RESPONSES, reports, timings
from specops.http.sse import event
from specops.http.state import Ctx
from specops.request import FinishReason, SamplingParams, TokenOutput
from specops.sampling_defaults import SamplingDefaults
from specops.text.fill_in import FillIn, FimPrompt
from specops.text.json_values import dumps

_SAMPLERS = {  # by field: llama-server's name of the sampler that reads it
    **{name: name for name in ("top_k", "top_p", "min_p")},
    **{f"{name}_penalty": "penalties" for name in ("repetition", "presence", "frequency")},
}
_LETTERS = {"e": "penalties", "k": "top_k", "p": "top_p", "m": "min_p", "t": "temperature"}
_ALL = list(_LETTERS.values())  # in the order in which they apply
_MAX_SAMPLERS = 64
_RANDOM = 0xFFFFFFFF  # llama-server's value for no seed
MAX_PROBS = 20  # as in chats
_MIN_AROUND = 128  # tokens: a suggestion from less context is useless, however fast
_Milliseconds = Annotated[float, Field(allow_inf_nan=False)]


def _by_name(samplers: object) -> object:
    """Return samplers' names; llama-server's command line abbreviates each to a letter."""
    if not isinstance(samplers, str):
        return samplers
    return [_LETTERS.get(letter, letter) for letter in samplers[: _MAX_SAMPLERS + 1]]


class LlamaRequest(LlamaOptions, ReportingOptions):
    """The fields that /infill and /completion share."""

    limit_field = "n_predict"
    bans_ends = True
    default_sampling = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    ignored_fields = frozenset(
        {
            *("cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "min_keep"),
            *("repeat_last_n", "sse_ping_interval"),
            *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent"),
            *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        }
    )

    model: Text | None = Field(None, description="as in GET /v1/models")
    n_predict: Integer = Field(
        -1,
        ge=-2,
        validation_alias=names_of("n_predict"),
        description="maximum tokens of the answer; -1: as many as the server allows; 0: only "
        "compute the prompt",
    )
    n_cmpl: Integer = Field(
        1,
        ge=1,
        le=MAX_CHOICES,
        validation_alias=names_of("n_cmpl"),
        description="answers to each prompt; above 1, the response is a list",
    )
    n_indent: Integer = Field(
        0,
        ge=0,
        le=1024,
        description="the answer ends before the first later line with less indentation",
    )
    t_max_predict_ms: _Milliseconds | None = Field(
        None,
        description="time limit, from the first token; 0 or less: no limit",
    )
    samplers: (
        Annotated[list[Text], Field(max_length=_MAX_SAMPLERS), BeforeValidator(_by_name)] | None
    ) = Field(
        None,
        description="the samplers to use, by name or llama-server's letters; the fields of "
        "others have no effect",
    )
    n_probs: Integer = Field(
        0,
        ge=0,
        le=MAX_PROBS,
        validation_alias=names_of("n_probs"),
        description="report each token's probability before sampling, and this many likeliest "
        "alternatives",
    )
    post_sampling_probs: bool | None = Field(
        False, description="with `n_probs`: the probabilities after penalties and samplers"
    )
    return_tokens: bool | None = Field(False, description="report the answer's tokens")
    image_data: Annotated[Any, Unsupported(None, [])] = Field(None, description="not supported")
    lora: Annotated[Any, Unsupported(None, [])] = Field(None, description="not supported")
    response_fields: Annotated[list[Text], Field(max_length=64)] | None = Field(
        None, description="only these fields of the answer; nested ones as `timings/prompt_n`"
    )

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return (self.n_cmpl or 1) if self.limit != 0 else 1

    @property
    def limit(self) -> int | None:
        """Maximum tokens of an answer; None: as many as the server allows."""
        return None if self.n_predict is None or self.n_predict < 0 else self.n_predict

    @property
    def token_logprobs(self) -> int | None:
        """Number of likeliest tokens to report for each position; None: no probabilities."""
        return self.n_probs or None

    @property
    def scheduling(self) -> dict[str, Any]:
        """Fields of `GenerationRequest`, with the limits of time and indentation."""
        return super().scheduling | {
            "predict_seconds": _seconds(self.t_max_predict_ms),
            "min_indent": self.n_indent or None,
            "drawn_logprobs": bool(self.post_sampling_probs),
        }

    def sampling(self, choice: int, model: SamplingDefaults) -> SamplingParams:
        """Return one choice's sampling parameters; only the named samplers apply."""
        drawn, named = super().sampling(choice, model), self.samplers
        if named is None:
            return drawn
        unused = [field for field, sampler in _SAMPLERS.items() if sampler not in named]
        changed = {field: getattr(SamplingParams(), field) for field in unused}
        if drawn.temperature and "temperature" not in named:
            # llama-server's sampler `infill` merges likely tokens and leaves almost no choice.
            changed["temperature"] = 0.0 if "infill" in named and choice == 0 else 1.0
        return replace(drawn, **changed)


class OtherFile(Body):
    """A chunk of another file."""

    ignored_fields = frozenset({"time"})  # llama.vim sends it

    filename: Text = "tmp"
    text: Text


class InfillRequest(LlamaRequest):
    """A gap in a text."""

    input_prefix: Text = Field(description="the text before the gap")
    input_suffix: Text = Field(description="the text after the gap")
    input_extra: Items[OtherFile] | None = Field(
        default=[], description="chunks of other files, `{filename, text}`"
    )
    prompt: Text | None = Field(
        "", description="beginning of the answer, such as the line up to the cursor"
    )
    t_max_prompt_ms: _Milliseconds | None = Field(
        None,
        description="time limit for the prompt: the text around the gap is cut to what the server "
        f"can read in this time, but to no less than {_MIN_AROUND} tokens; 0 or less: no limit",
    )


class PromptText(Body):
    """llama-server's form of a prompt that may have images."""

    prompt_string: Text
    multimodal_data: Annotated[list[Any], Field(max_length=0)] | None = None


_OnePrompt = Text | MixedPrompt | PromptText


class CompletionRequest(LlamaRequest):
    """Prompts to continue: texts, tokens, or a mixture."""

    ignored_fields = LlamaRequest.ignored_fields | {"t_max_prompt_ms"}

    prompt: (
        Text
        | PromptText
        | MixedPrompt
        | Annotated[list[_OnePrompt], Field(min_length=1, max_length=MAX_CHOICES)]
    ) = Field(
        description="a text, or a list of tokens and texts. A list of texts only, or one that "
        "contains lists, is several prompts, and the answer is a list"
    )

    @property
    def prompts(self) -> list[str | list[int | str]]:
        """The prompts as a list, even if there is only one."""
        return [
            item.prompt_string if isinstance(item, PromptText) else item
            for item in listed(self.prompt)
        ]


class LlamaAnswer(BaseModel):
    """An answer; with `n_cmpl` above 1, one of a list."""

    index: int
    content: str
    id_slot: int = -1
    stop: bool = Field(description="the answer ends here; false within a stream")
    model: str
    tokens_predicted: int
    tokens_evaluated: int = Field(description="tokens of the prompt")
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool = Field(description="the prompt leaves out parts of the request")
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str = Field(description="the stop string that ended the answer")
    tokens_cached: int = Field(description="tokens of prompt and answer")
    timings: dict[str, int | float]
    drafter: str
    accepted_found_in: dict[str, int] = Field(description="as in `/generate`'s `details`")
    tokens: list[int] = Field(description="of the answer; empty without `return_tokens`")
    completion_probabilities: list[dict[str, Any]] | None = Field(None, exclude_if=absent)


_Chosen = LlamaAnswer | dict[str, Any]  # the latter with `response_fields`
_Answers = _Chosen | list[_Chosen]
INFILL, COMPLETION = "/infill", "/completion"
_RESPONSES = RESPONSES | error_responses(501)
router = APIRouter(tags=["llama-server"])
PROTOCOL = Protocol(
    router=router,
    prefixes=(INFILL, COMPLETION, "/props", "/slots"),
    prompts={
        COMPLETION: Prompt("prompt", "text_completion"),
        INFILL: Prompt("input_prefix", "text_completion"),
    },
    too_long_message="the request exceeds the available context size ({prompt} tokens, {context} "
    "fit with the answer), try increasing it (context_length_exceeded)",
)


@router.post(INFILL, response_model=_Answers, responses=_RESPONSES)
async def infill(body: InfillRequest, ctx: Ctx) -> Response:
    """Fill in a gap; 501 if the model was not trained for it.

    With `stream` the answer is a series of server-sent events: one per step with the new text, and
    one with the other fields.
    """
    engine = check_model(ctx, body.model or "")
    if (gap := FillIn.of(engine.tokenizer)) is None:
        missing = "".join(f"{name} token is missing. " for name in ("prefix", "suffix", "middle"))
        message = f"Infill is not supported by this model: {missing}"  # llama-server's words
        raise ApiError(501, message, code="not_supported")
    info, before, behind = engine.info, body.input_prefix, body.input_suffix
    chunks = [(chunk.filename, chunk.text) for chunk in body.input_extra or ()]
    seconds = None if body.limit == 0 else _seconds(body.t_max_prompt_ms)
    made: list[FimPrompt] = []

    def most(position: int) -> float:
        if seconds is None:
            return inf
        return max(_MIN_AROUND, info.reading.tokens(seconds, position))

    def prepare() -> Prepared:
        typed = body.prompt or ""
        made.append(gap.prompt(before, behind, info.context, most=most, chunks=chunks, typed=typed))
        return Prepared.of(made, [before, behind], gap)

    generation = await generate(ctx, body, prepare)
    writer = _Writer(generation, engine, body, truncated=made[0].truncated)
    return await writer.response(stream=body.streams)


@router.post(COMPLETION, response_model=_Answers, responses=RESPONSES)
async def completion(body: CompletionRequest, ctx: Ctx) -> Response:
    """Continue prompts, as llama-server does."""
    engine = check_model(ctx, body.model or "")

    prompts = body.prompts

    def prepare() -> Prepared:
        encoded = [mixed_tokens(prompt, engine, "prompt") for prompt in prompts]
        return Prepared(prompts=encoded, logged_prompt=prompts)

    generation = await generate(ctx, body, prepare, count=len(prompts))
    return await _Writer(generation, engine, body).response(stream=body.streams)


@router.get("/props", responses=error_responses(401, 500, 503))
async def props(ctx: Ctx) -> dict[str, Any]:
    """Describe the loaded model, as llama-server does."""
    engine = ctx.engine
    info, template = engine.info, engine.chat_template
    drawn = CompletionRequest(prompt="").sampling(0, info.sampling)  # type: ignore[call-arg]
    return {
        "default_generation_settings": {"n_ctx": info.context, "params": _drawn(drawn)},
        "total_slots": info.slots,
        "model_alias": info.name,
        "model_path": info.name,  # the real path stays private
        "modalities": {"vision": False, "audio": False},
        "chat_template": template.source if template else "",
        "build_info": fingerprint(engine),
    }


@router.get("/slots", responses=error_responses(401, 500, 503))
async def slots(ctx: Ctx) -> list[dict[str, Any]]:
    """List the slots for concurrent requests, and which are busy."""
    info, running = ctx.engine.info, ctx.app.service.running
    speculates = info.default_drafter != "none"
    return [
        {"id": slot, "n_ctx": info.context, "speculative": speculates, "is_processing": busy}
        for slot, busy in enumerate(index < running for index in range(info.slots))
    ]


@router.post("/rerank", include_in_schema=False)
async def rerank(ctx: Ctx) -> Response:
    """Answer 501: none of this server's models can rank texts."""
    message = "This server has no models that rank texts: compare their embeddings instead"
    raise ApiError(501, message, code="not_supported")


def _seconds(milliseconds: float | None) -> float | None:
    return milliseconds / 1000 if milliseconds and milliseconds > 0 else None


def _drawn(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters by llama-server's names."""
    names = ("temperature", *(name for name in _SAMPLERS if name != "repetition_penalty"))
    drawn = {name: getattr(sampling, name) for name in names}
    seed = _RANDOM if sampling.seed is None else sampling.seed
    return drawn | {"seed": seed, "repeat_penalty": sampling.repetition_penalty}


class _Writer(Writer):
    def __init__(
        self, generation: Generation, engine: Engine, body: LlamaRequest, *, truncated: bool = False
    ) -> None:
        super().__init__(generation)
        self._engine = engine
        self._body = body
        self._truncated = truncated

    def whole_json(self) -> bytes:
        answers = [
            self._chosen(index, answer.text) for index, answer in enumerate(self.generation.answers)
        ]
        return dumps(answers[0] if len(answers) == 1 else answers)

    def step(self, step: Step) -> bytes:
        answer, pieces = self.generation.answers[step.index], step.output.pieces
        # With probabilities each token gets an event, as clients expect.
        parts = [pieces[i : i + 1] for i in range(len(pieces))] if self._body.n_probs else [pieces]
        before, sent = len(answer.pieces) - len(pieces), b""
        for part in parts if pieces else [()] * bool(step.output.prompt_computed):
            before += len(part)
            fields = {
                "index": step.index,
                "content": "".join(piece.text for piece in part),
                "tokens": [piece.token for piece in part],
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": before,
                "tokens_evaluated": len(answer.request.prompt_tokens),
            }
            if probabilities := self._probabilities(part):
                fields["completion_probabilities"] = probabilities
            sent += event(fields | reports(answer))
        return sent + event(self._chosen(step.index, "")) if step.output.finish else sent

    def end(self) -> bytes:
        return b""

    def _chosen(self, index: int, content: str) -> dict[str, Any]:
        """Return the requested fields of a complete answer."""
        fields = self._answer(index, content).model_dump()
        if not (paths := self._body.response_fields):
            return fields
        chosen = {}
        for path in paths:
            value: Any = fields
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                chosen[path] = value
        return chosen

    def _answer(self, index: int, content: str) -> LlamaAnswer:
        answer = self.generation.answers[index]
        request, text = answer.request, answer.text
        prompt, predicted = len(request.prompt_tokens), answer.stats.generated_tokens
        figures = timings([answer]).model_dump()
        told = [] if self._body.streams else answer.pieces
        return LlamaAnswer(
            index=index,
            content=content,
            stop=True,
            model=self._engine.info.name,
            tokens_predicted=predicted,
            tokens_evaluated=prompt,
            generation_settings=_drawn(request.sampling)
            | {
                "n_predict": request.max_new_tokens,
                "stop": list(self._body.stops),
                "stream": self._body.streams,
                "samplers": self._body.samplers or _ALL,
                "n_probs": self._body.n_probs or 0,
                "ignore_eos": bool(self._body.ignore_eos),
                "logit_bias": [
                    {"token": token, "bias": None if bias == NEVER else bias}
                    for token, bias in request.sampling.logit_bias
                ],
            },
            prompt=self._prompt,
            has_new_line="\n" in text,
            truncated=self._truncated or prompt + predicted >= self._engine.info.context,
            tokens_cached=prompt + predicted,
            drafter=figures.pop("drafter"),
            accepted_found_in=figures.pop("accepted_found_in"),
            timings=figures,
            tokens=[piece.token for piece in told] if self._body.return_tokens else [],
            completion_probabilities=self._probabilities(told) or None,
            **self._stop(answer),
        )

    def _probabilities(self, pieces: Sequence[TokenOutput]) -> list[dict[str, Any]]:
        """Return the tokens' probabilities; an empty list if they were not requested."""
        drawn, spelling = self._body.post_sampling_probs, self._engine.tokenizer.spelling

        def told(token: int, value: float) -> dict[str, Any]:
            text, encoded = spelling(token)
            number = {"prob": min(1.0, exp(value))} if drawn else {"logprob": value}
            return {"id": token, "token": text, "bytes": list(encoded), **number}

        return [
            told(piece.token, found.chosen)
            | {"top_probs" if drawn else "top_logprobs": [told(*item) for item in found.top]}
            for piece in pieces
            if (found := piece.logprob)
        ]

    @cached_property
    def _prompt(self) -> str:
        """The first prompt's text; empty if `response_fields` leaves it out."""
        paths = self._body.response_fields
        if paths and "prompt" not in paths:
            return ""
        first = self.generation.answers[0].request
        return self._engine.tokenizer.decode(first.prompt_tokens, special=True)

    def _stop(self, answer: Answer) -> Any:
        """Return why an answer ended; an end token's text is not one of the client's stops."""
        word = answer.last.stop if answer.last else None
        if word in self._body.stops:
            return {"stop_type": "word", "stopping_word": word}
        ended = answer.last is not None and answer.last.finish is FinishReason.STOP
        return {"stop_type": "eos" if ended else "limit", "stopping_word": ""}
