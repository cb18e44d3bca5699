"""The only way into the engine: turns a checked body into requests, and submits them.

`generate` is for all generating endpoints; `generate_chat` uses it to continue a conversation;
`embed` is for embeddings. Requests wait, are counted and are released here: a request holds one
place in the queue from its arrival, one for each answer from `generate` on, and the engine counts
it from `enqueue` on. Work in proportion to a text's length would hold up the event loop: it goes to
threads, where clients take turns.

Args of functions:
    ctx: the HTTP request's context.
    body: the checked body.
    make: returns the conversation, or raises `InvalidField`; called on a thread if it may take
        long.
"""

import asyncio
import itertools
import json
import re
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import Request, Response
from fastapi.routing import APIRoute

from specops.config import Settings
from specops.engine.engine import Engine
from specops.engine.model_info import ModelInfo
from specops.http.answering.prompt import (
    AnswerFormat,
    Conversation,
    Tokens,
    encode,
    mixed_tokens,
    prompt_tokens,
    truncate_to_fit,
)
from specops.http.answering.schema import (
    NEVER,
    Body,
    EngineOptions,
    ignore,
    ignore_keywords,
    ignore_unknown,
)
from specops.http.answering.writer import Generation
from specops.http.errors import ApiError, InvalidField, client_left, timeout_error, unavailable
from specops.http.security.request_body import LARGE_BODY_BYTES, MAX_BATCH_TOKENS, MAX_BODY_BYTES
from specops.http.sse import calling_on_disconnect
from specops.http.state import Context
from specops.request import FIXED_K_DRAFT, SUGGESTION, GenerationRequest, Grammar
from specops.serving.client_turns import ClientTurns
from specops.text.confined_process import ProgramProcessError
from specops.text.fill_in import FillIn, FimPrompt
from specops.text.grammar import Matcher
from specops.text.grammar_source import GrammarError
from specops.text.json_values import in_whole_characters

# -- the served model ------------------------------------------------------------------------------

LATEST = ":latest"  # Ollama's clients append this tag to a name without one
_VERSION = version("specops")


def fingerprint(engine: Engine) -> str:
    """Return the output's fingerprint: with equal fingerprints, a seed gives the same text."""
    info = engine.info
    return f"specops-{_VERSION}-{info.name}-{info.quant}-{info.threads}"


def tagged(name: str) -> str:
    """Return the model's name as Ollama lists it."""
    return name if ":" in name else name + LATEST


def matches(name: str, engine: Engine) -> bool:
    """Return whether a client means this model, whatever the case and Ollama's tags.

    Ollama's clients append `:latest` to a name, and write `:` for the hyphen before a size.
    Plug-ins for llama-server, which serves one model, send an empty name.
    """
    own, asked = engine.info.name.casefold(), name.casefold()
    return asked in ("", own, own + LATEST) or asked.replace(":", "-") == own


def check_model(ctx: Context, name: str, *, exact: bool = False) -> Engine:
    """Return the engine of the requested model.

    Clients of other servers name those servers' models. The served model answers, unless the
    settings refuse that, and a header of the answer names it.

    Args:
        ctx: the HTTP request's context.
        name: the name that the client sent; empty: any model.
        exact: whether to refuse other names whatever the settings, as for a model's description.

    Raises:
        NotReady: see `AsyncEngine.engine`.
        ApiError: this server has another model.
    """
    engine = ctx.engine
    ctx.served = engine.info.name
    refuses = exact or ctx.settings.unknown_model == "refuse"
    if refuses and not matches(name, engine):
        raise ApiError(
            404,
            ctx.protocol.unknown_model_message.format(
                requested=name[:64], own=engine.info.name, tagged=tagged(engine.info.name)
            ),
            code="model_not_found",
            param="model",
        )
    return engine


# -- work on threads -------------------------------------------------------------------------------

_T = TypeVar("_T")


async def in_turn(
    ctx: Context,
    turns: ClientTurns,
    work: Callable[[], _T],
    *,
    seconds: float = 0.0,
    stop: Callable[[], None] = lambda: None,
) -> _T:
    """Call a function on a thread, in the client's turn, for a request whose body has been read.

    Args:
        ctx: the HTTP request's context.
        turns: the clients that wait for the thread.
        work: the function to call.
        seconds, stop: see `ClientTurns.run`.

    Raises:
        ApiError: the client has left.
    """

    def leave() -> None:
        task.cancel()

    task = asyncio.ensure_future(turns.run(ctx.whose, work, seconds=seconds, stop=stop))
    async with calling_on_disconnect(ctx.receive, leave):
        try:
            return await task
        except asyncio.CancelledError:
            if (own := asyncio.current_task()) is not None and own.cancelling():
                raise  # a time limit of the request, or the server's end
            raise client_left() from None


# Encoding takes a third of a microsecond per character: the event loop can wait for this many.
_LONG_TEXT = 4096
_ENCODING_SECONDS = 3.3e-7
# Maximum bytes of waiting bodies without a place in the queue, of all clients and of one. Small
# bodies count as the minimum, which bounds their number.
_MAX_ASIDE, _MAX_ASIDE_EACH, _MIN_ASIDE = 8 * MAX_BODY_BYTES, 4 * MAX_BODY_BYTES, 1 << 16


async def run_off_loop(
    ctx: Context, work: Callable[[], _T], size: int, *, renders: bool = False
) -> _T:
    """Do work in proportion to a text's length, on a thread if it may take long.

    Args:
        ctx: the HTTP request's context.
        work: the function to call; it must not need the event loop.
        size: number of characters.
        renders: whether the work renders a chat template.

    Raises:
        ApiError: the work took too long, or the client left.
    """
    if size < _LONG_TEXT and not renders:
        return work()
    if size < _LONG_TEXT:  # a template may still take a second
        turns = ctx.app.executors.rendering
    else:  # short texts do not wait for those that take a second
        threads = ctx.app.executors
        turns = threads.encoding if size <= LARGE_BODY_BYTES else threads.encoding_long
    limit = ctx.settings.request_timeout
    try:
        async with asyncio.timeout(limit):
            return await in_turn(ctx, turns, work, seconds=size * _ENCODING_SECONDS)
    except TimeoutError:
        raise timeout_error("encoded", limit) from None


async def run_limited(
    ctx: Context, work: Callable[[], _T], size: int, *, renders: bool = False
) -> _T:
    """Do work in proportion to a text's length for a request without a place in the queue.

    Args:
        ctx: the HTTP request's context.
        work: see `run_off_loop`.
        size: number of characters.
        renders: whether the work renders a chat template.

    Raises:
        ApiError: the work took too long, the client left, or too many such requests wait already.
    """
    waiting, own = ctx.app.aside, max(ctx.body_bytes, _MIN_ASIDE)
    waiting[ctx.whose] += own
    try:
        if waiting[ctx.whose] > _MAX_ASIDE_EACH or waiting.total() > _MAX_ASIDE:
            raise unavailable("too many texts are being encoded or decoded; try again", "texts")
        return await run_off_loop(ctx, work, size, renders=renders)
    finally:
        waiting[ctx.whose] -= own
        if not waiting[ctx.whose]:
            del waiting[ctx.whose]


# -- options that need the tokenizer ---------------------------------------------------------------

COMPILE_SECONDS = 15.0  # the largest grammar takes a twentieth of it on an idle machine
_COMPILING_SECONDS = 1e-5  # per character, of the slowest known schemas


def biases(body: EngineOptions, engine: Engine) -> tuple[tuple[int, float], ...]:
    """Return tokens, each with the number to add to its logit.

    Raises:
        InvalidField: a token does not exist.
    """
    by_token: dict[int, float] = {}
    for token, bias in (body.logit_bias or {}).items():
        tokens = (token,) if isinstance(token, int) else _spelled(token, engine)
        if not tokens or max(tokens) >= engine.info.vocab_size:
            vocab = engine.info.vocab_size
            message = f"token {token!r} is not in the vocabulary of {vocab} tokens"
            raise InvalidField("logit_bias", message)
        by_token |= dict.fromkeys(tokens, bias)
    if body.bans_ends and body.ignore_eos:
        by_token |= dict.fromkeys(sorted(engine.info.end_tokens), NEVER)
    return tuple(by_token.items())


def bad_words(body: EngineOptions, engine: Engine) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at the beginning of a text and after a space.

    A word that begins with white space gets no space before it: for a line break, that would forbid
    the space.

    Raises:
        InvalidField: a word has no tokens.
    """
    words: dict[tuple[int, ...], None] = {}
    for word in body.bad_words or ():
        for text in (word,) if word[0].isspace() else (word, f" {word}"):
            if not (tokens := _spelled(text, engine)):
                raise InvalidField(
                    "bad_words", f"{word[:64]!r} cannot be written in this model's tokens"
                )
            words[tokens] = None
    return tuple(words)


def _spelled(text: str, engine: Engine) -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode(text, special_tokens=False))


async def compile_grammar(ctx: Context, grammar: Grammar, body: EngineOptions) -> Matcher:
    """Compile a grammar before the engine's thread needs it.

    Args:
        ctx: the HTTP request's context.
        grammar: the grammar of the answer.
        body: the checked body.

    Returns:
        A matcher. While it lives, the grammar stays compiled.

    Raises:
        ApiError: other grammars took all the time, or the client has left.
        InvalidField: compiling failed, or another option forbids tokens, too.
    """
    field = body.grammar_field or "tools"
    for name in ("bad_words", "min_tokens", "allowed_token_ids"):
        if getattr(body, name):  # together they might forbid every token
            raise InvalidField(name, f"cannot be combined with `{field}`")
    grammars = ctx.engine.grammars
    if (matcher := grammars.compiled(grammar, ctx.client)) is not None:
        return matcher
    work, size = partial(grammars.matcher, grammar, ctx.client), _COMPILING_SECONDS * grammar.size
    try:
        async with asyncio.timeout(COMPILE_SECONDS):
            turns = ctx.app.executors.compiling
            return await in_turn(ctx, turns, work, seconds=size, stop=grammars.stop)
    except GrammarError as error:
        field = "tools" if error.in_tools else field
        raise InvalidField(field, str(error), code="invalid_grammar") from None
    except ProgramProcessError as error:
        raise unavailable(str(error), "grammar_pending") from None
    except TimeoutError:
        message = f"the grammar was not compiled within {COMPILE_SECONDS:g} seconds; try again"
        raise unavailable(message, "grammar_pending") from None


# -- generate --------------------------------------------------------------------------------------

_ANSWERS_SHARE = 4  # the answer gets this part of the context, a quarter: else messages are dropped
_MAX_PROMPT_LOGPROBS = 1 << 18  # of one HTTP request: 3 MB, 20 MB of JSON
_sequence = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Prompts, ready for the engine.

    Attributes:
        prompts: their tokens.
        logged_prompt: the prompts as the client sent them, for a log that shows prompts.
        format: how a chat model writes the answers.
        fim: how the model fills in a gap.
        ignored: names of ignored parts of the body, besides unknown fields.
    """

    prompts: Sequence[Tokens]
    logged_prompt: Any
    format: AnswerFormat | None = None
    fim: FillIn | None = None
    ignored: Sequence[str] = ()

    @classmethod
    def of(cls, encoded: Sequence[FimPrompt], logged_prompt: Any, fim: FillIn | None) -> Self:
        """Return prompts around gaps; `ignored` says whether parts of them were left out.

        Args:
            encoded: the prompts.
            logged_prompt: see `Prepared`.
            fim: how the model fills in a gap; None: there is no gap.
        """
        cut = any(prompt.truncated for prompt in encoded)
        return cls(
            prompts=[prompt.tokens for prompt in encoded],
            logged_prompt=logged_prompt,
            fim=fim,
            ignored=("prompt[far-ends]",) if cut else (),
        )


async def generate(
    ctx: Context,
    body: EngineOptions,
    prepare: Callable[[], Prepared],
    *,
    count: int = 1,
    more: int = 0,
    renders: bool = False,
) -> Generation:
    """Check what the schema cannot, prepare the prompts, and submit them to the engine.

    Args:
        ctx: the HTTP request's context.
        body: the checked body.
        prepare: returns the prompts; called on a thread if it may take long.
        count: number of prompts.
        more: number of characters that `prepare` reads in addition to the body.
        renders: whether a chat template writes the prompts.

    Raises:
        InvalidField: this server cannot use a field's value.
        NotReady, QueueFull, PromptTooLong, UnknownToken: see `AsyncEngine.submit`.
    """
    engine, settings = ctx.engine, ctx.settings
    ignore_unknown(ctx, body)
    _reserve(ctx, count * body.choices)
    stop_tokens = prompt_tokens(body.stop_token_ids or [], engine, "stop_token_ids")
    limits = _drafting(body, settings, engine.info) | {"max_new_tokens": _limit(body, settings)}

    def work() -> tuple[Prepared, dict[str, Any]]:
        prepared = prepare()
        return prepared, _constraints(body, engine, prepared.format)

    prepared, spelled = await run_off_loop(ctx, work, ctx.body_bytes + more, renders=renders)
    ignore(ctx, prepared.ignored)
    _check_prompt_logprobs(body, prepared.prompts)
    if spelled["grammar"] is not None:
        # It keeps the grammar compiled until the answer ends.
        ctx.matcher = await compile_grammar(ctx, spelled["grammar"], body)
        ignore_keywords(ctx, ctx.matcher.ignored, body.grammar_field)
    form, ends = prepared.format, prepared.fim.ends if prepared.fim else {}
    # Only end tokens that decoded text shows: an answer may spell out the others.
    visible = [text for text, token in ends.items() if engine.tokenizer.shown_bytes(token)]
    suggests = prepared.fim is not None and limits["max_new_tokens"] > 0
    common = replace(
        plain_request(ctx),
        **limits,
        stop=(*body.stops, *visible),
        reasoning=form.reasoning if form else None,
        stop_token_ids=(*stop_tokens, *ends.values()),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.token_logprobs,
        logprob_tokens=prompt_tokens([*body.logprob_tokens], engine, "logprob_token_ids"),
        prompt_logprobs=body.prompt_top,
        include_stop=body.includes_stop,
        stream=body.streams,
        **body.scheduling | ({"priority": SUGGESTION} if suggests else {}),
    )
    sampling = [
        replace(body.sampling(choice, engine.info.sampling), **spelled)
        for choice in range(body.choices)
    ]
    requests = [
        replace(common, prompt_tokens=tuple(tokens), sampling=one)
        for tokens in prepared.prompts
        for one in sampling
    ]
    return enqueue(ctx, requests, prepared.logged_prompt, choices=body.choices, format=form)


def _constraints(
    body: EngineOptions, engine: Engine, format: AnswerFormat | None
) -> dict[str, Any]:
    """Return the constraints on the answer's tokens, as fields of `SamplingParams`."""
    return {
        "grammar": format.grammar(body.grammar) if format else body.grammar,
        "logit_bias": biases(body, engine),
        "bad_words": bad_words(body, engine),
        "allowed_tokens": prompt_tokens(body.allowed_token_ids or [], engine, "allowed_token_ids"),
    }


def _check_prompt_logprobs(body: EngineOptions, prompts: Sequence[Tokens]) -> None:
    """Refuse an answer whose prompt probabilities would take too much memory."""
    if body.prompt_top is None:
        return
    told = (1 + body.prompt_top) * body.choices * sum(map(len, prompts))
    if told > _MAX_PROMPT_LOGPROBS:
        message = f"{told:,} probabilities of prompt tokens: at most {_MAX_PROMPT_LOGPROBS:,}"
        raise InvalidField("prompt", f"{message} in one answer; send shorter or fewer prompts")


def _reserve(ctx: Context, answers: int) -> None:
    """Exchange the request's place in the queue for one place per answer."""
    places = ctx.engine.info.slots + ctx.settings.queue_size
    if answers > places:
        message = f"prompts times `n` must be at most {places} on this server"
        raise InvalidField("n", message)
    ctx.release()  # no other request can come in between
    ctx.release = ctx.app.service.admission.reserve(answers)


async def generate_chat(
    ctx: Context, body: EngineOptions, make: Callable[[], Conversation], *, more: int = 0
) -> Generation:
    """Submit the conversation that `make` returns to the engine.

    Args:
        ctx, body, make: see the module.
        more: number of bytes that `make` reads in addition to the body.

    Raises:
        InvalidField: this server cannot use a field's value.
        NotReady, QueueFull, PromptTooLong, UnknownToken: see `AsyncEngine.submit`.
    """
    engine = ctx.engine
    most = min(ctx.settings.max_new_tokens, engine.info.context // _ANSWERS_SHARE)
    room = engine.info.context - min(most, body.limit or most)

    def prepare() -> Prepared:
        asked = make()
        prompt, num_dropped = truncate_to_fit(engine, asked, room)
        form = AnswerFormat(engine, asked, starts_in_reasoning=prompt.starts_in_reasoning)
        ignored = (*asked.ignored, *((f"messages[0:{num_dropped}]",) if num_dropped else ()))
        return Prepared(
            prompts=[prompt.tokens], logged_prompt=asked.messages, format=form, ignored=ignored
        )

    return await generate(ctx, body, prepare, more=more, renders=True)


async def chat_tokens(
    ctx: Context, body: Body, engine: Engine, make: Callable[[], Conversation], *, more: int = 0
) -> int:
    """Count the tokens of the prompt of the conversation that `make` returns.

    Args:
        ctx, body, make: see the module.
        engine: encodes the prompt.
        more: number of bytes that `make` reads in addition to the body.

    Raises:
        ApiError, InvalidField: see `run_limited` and `encode`.
    """
    ignore_unknown(ctx, body)

    def work() -> tuple[Sequence[str], Tokens]:
        asked = make()
        return asked.ignored, encode(engine, asked, any_length=True).tokens

    ignored, tokens = await run_limited(ctx, work, ctx.body_bytes + more, renders=True)
    ignore(ctx, ignored)
    return len(tokens)


def plain_request(ctx: Context) -> GenerationRequest:
    """Return the common part of the engine's requests of one HTTP request, without a prompt."""
    return GenerationRequest(
        request_id="",
        prompt_tokens=(),
        max_new_tokens=0,
        arrival=ctx.arrival,
        deadline=ctx.arrival + ctx.settings.request_timeout,
        client=ctx.client,
        trace=ctx.trace,
    )


def enqueue(
    ctx: Context,
    requests: Sequence[GenerationRequest],
    logged_prompt: Any,
    *,
    choices: int = 1,
    format: AnswerFormat | None = None,
) -> Generation:
    """Submit the engine's requests of one HTTP request, in their reserved places.

    Args:
        ctx: the HTTP request's context.
        requests: the requests, all answers to a prompt together.
        logged_prompt: the prompts as the client sent them, for a log that shows prompts.
        choices: number of answers to each prompt.
        format: how a chat model writes the answers.

    Raises:
        NotReady, QueueFull, PromptTooLong, UnknownToken: see `AsyncEngine.submit`.
    """
    # Two clients may send the same X-Request-ID: the engine needs unique ids.
    named = [replace(item, request_id=f"{ctx.request_id}/{next(_sequence)}") for item in requests]
    ctx.release()
    handle = ctx.app.service.submit(*named)
    return Generation(
        handle, ctx, choices, logged_prompt if ctx.settings.log_prompts else None, format
    )


def _limit(body: EngineOptions, settings: Settings) -> int:
    """Return the maximum tokens of an answer: the client's limit, within the server's."""
    most, limit = settings.max_new_tokens, body.limit
    return most if limit is None else min(limit, most)


def _drafting(body: EngineOptions, settings: Settings, info: ModelInfo) -> dict[str, Any]:
    """Return the drafting options, with the server's defaults and within its limits."""
    adaptive = body.adaptive is not False
    default = settings.max_k_draft if adaptive else min(FIXED_K_DRAFT, settings.max_k_draft)
    k_draft = default if body.k_draft is None else body.k_draft
    if k_draft > settings.max_k_draft:
        raise InvalidField("k_draft", f"must be at most {settings.max_k_draft} on this server")
    drafter = body.drafter or info.default_drafter
    if drafter not in info.drafters:
        raise InvalidField(
            "drafter", f"this model has no drafter {drafter!r}; it has {', '.join(info.drafters)}"
        )
    k_draft = k_draft if drafter != "none" else 0
    return {"k_draft": k_draft, "drafter": drafter, "adaptive": adaptive}


# -- embed -----------------------------------------------------------------------------------------
# A request takes one place in the queue and one slot, whatever its number of texts. The engine
# embeds them one after the other, in the room that other requests leave in a pass.

Vector = npt.NDArray[np.float32]


async def embed(
    ctx: Context,
    body: Body,
    inputs: Sequence[str | list[int | str]],
    *,
    room: int | None = None,
) -> tuple[Generation, Vector, int]:
    """Embed texts.

    Args:
        ctx: the HTTP request's context.
        body: the checked body.
        inputs: each as text or as tokens.
        room: number of tokens to which each text is cut; None: texts stay whole.

    Returns:
        The generation, the vectors [texts, entries], and the number of the texts' tokens.

    Raises:
        ApiError, InvalidField: the model has no embeddings, or a token does not exist.
        NotReady, QueueFull, PromptTooLong, UnknownToken: see `AsyncEngine.submit`.
    """
    engine = ctx.engine
    ignore_unknown(ctx, body)
    if not engine.info.embedding_size:
        raise ApiError(
            400,
            f"the graph of {engine.info.name} does not output the hidden states that embeddings "
            "need: serve a model that this server has converted",
            code="no_embeddings",
        )

    def read(item: str | list[int | str]) -> str | list[int | str]:
        if isinstance(item, str):
            return ctx.read_text(item)
        return [ctx.read_text(part) if isinstance(part, str) else part for part in item]

    def encode() -> list[Tokens]:
        encoded, left, whole = [], MAX_BATCH_TOKENS, room is None
        for item in inputs:
            encoded.append(mixed_tokens(read(item), engine, "input", any_length=not whole)[:room])
            left -= len(encoded[-1])
            if left < 0:
                message = f"more than {MAX_BATCH_TOKENS} tokens: send fewer texts at a time"
                raise InvalidField("input", message)
        return encoded

    encoded = await run_off_loop(ctx, encode, ctx.body_bytes)
    request = replace(
        plain_request(ctx),
        prompt_tokens=encoded[0],
        more_prompts=tuple(encoded[1:]),
        embed=True,
        stream=False,
    )
    logged_prompt = [read(item) for item in inputs] if ctx.settings.log_prompts else None
    generation = enqueue(ctx, [request], logged_prompt)
    (answer,) = await generation.finished()
    rows = answer.last.embeddings if answer.last else None
    if rows is None:
        raise AssertionError("a finished request for embeddings has them")
    return generation, rows, sum(map(len, encoded))


# -- large batches of texts ------------------------------------------------------------------------
# Each of many texts to embed stays in the body's bytes until it is encoded. A text with an emoji
# takes four bytes per character in Python, so a body of 4 MiB would become 16 MiB of JSON, and its
# texts 16 MiB more. So marks replace long texts before the JSON is parsed.

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_LONG_BYTES = 256  # bytes; shorter ones, and most names, stay as they are


class LateTexts:
    """The long texts of a JSON body.

    Attributes:
        rest: the body with marks instead of them.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._spans: list[tuple[int, int]] = []
        mark = uuid.uuid4().hex  # which no client knows
        self._marks = re.compile(rf"{mark}(\d+);")

        def kept(found: re.Match[bytes]) -> bytes:
            if found.end() - found.start() < _LONG_BYTES:
                return found[0]
            self._spans.append(found.span())
            return f'"{mark}{len(self._spans) - 1};"'.encode()

        self.rest = _STRING.sub(kept, body)

    def read(self, text: str) -> str:
        """Return a text of the body; in long ones, half surrogate pairs become U+FFFD.

        Raises:
            InvalidField: it is not valid JSON.
        """
        return self._marks.sub(lambda found: self._long(int(found[1])), text)

    def _long(self, number: int) -> str:
        start, end = self._spans[number]
        try:
            text: str = in_whole_characters(json.loads(self._body[start:end]))
        except ValueError as error:
            raise InvalidField("input", f"a text cannot be read: {error}") from None
        return text


class _BatchRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= MAX_BODY_BYTES:
            return await super().json()
        texts = await asyncio.to_thread(LateTexts, body)
        Context.of(self.scope).read_text = texts.read
        return json.loads(texts.rest)


class BatchRoute(APIRoute):
    """An endpoint that reads texts with `Context.read_text`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            return await handle(_BatchRequest(request.scope, request.receive))

        return handled
