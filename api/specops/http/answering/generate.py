"""The one way in: a checked body becomes requests of the engine, and those are submitted.

`generate` is for all endpoints that generate; `generate_chat` continues a conversation with it. A
request waits, is counted and is released here: it holds one place in the queue from its arrival,
places of all its answers from `generate` on, and the engine counts it from `enqueue` on.

Args of functions:
    ctx: of the HTTP request.
    body: the checked body.
    make: returns the conversation, or raises `InvalidField`; called on a thread where that may take
        long.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specops.config import Settings
from specops.engine.engine import Engine
from specops.engine.model_info import ModelInfo
from specops.http.answering.answer_format import AnswerFormat
from specops.http.answering.answers import Generation
from specops.http.answering.body import Body
from specops.http.answering.conversation import Conversation
from specops.http.answering.ignored import ignore, ignore_keywords, ignore_unknown
from specops.http.answering.offload import run_limited, run_off_loop
from specops.http.answering.options import EngineOptions
from specops.http.answering.prompts import Tokens, encode, prompt_tokens, truncate_to_fit
from specops.http.answering.token_options import bad_words, biases, compile_grammar
from specops.http.errors import InvalidField
from specops.http.state import Context
from specops.request import FIXED_K_DRAFT, SUGGESTION, GenerationRequest
from specops.text.fill_in import FillIn, FimPrompt

_ANSWERS_SHARE = 4  # of the context is kept for an answer before messages are left out
_MAX_PROMPT_LOGPROBS = 1 << 18  # of one HTTP request: 3 MB of them, 20 MB of JSON
_sequence = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Prompts, ready for the engine.

    Attributes:
        prompts: their tokens.
        logged_prompt: the prompts as the client sent them, for a log that shows prompts.
        format: how a chat model writes the answers.
        fim: how the model is asked to fill in a gap.
        ignored: names of ignored parts of the body, besides unknown fields.
    """

    prompts: Sequence[Tokens]
    logged_prompt: Any
    format: AnswerFormat | None = None
    fim: FillIn | None = None
    ignored: Sequence[str] = ()

    @classmethod
    def of(cls, encoded: Sequence[FimPrompt], logged_prompt: Any, fim: FillIn | None) -> Prepared:
        """Prompts around gaps; the parts of them that were left out are named.

        Args:
            encoded: the prompts.
            logged_prompt: see `Prepared`.
            fim: how the model fills in; None: there is no gap.
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
    """Check what the schema cannot check, prepare the prompts, and submit them to the engine.

    Args:
        prepare: called on a thread where that may take long.
        count: number of prompts.
        more: number of characters that `prepare` reads in addition to the body.
        renders: a chat template writes the prompts.

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
        # Held until the answer ends: it keeps the grammar compiled while the request waits.
        ctx.matcher = await compile_grammar(ctx, spelled["grammar"], body)
        ignore_keywords(ctx, ctx.matcher.ignored, body.grammar_field)
    form, ends = prepared.format, prepared.fim.ends if prepared.fim else {}
    # Those that a decoded text shows. Of the others an answer may have the letters.
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
    """Return what the answer's tokens have to be, as `SamplingParams` have it."""
    return {
        "grammar": format.grammar(body.grammar) if format else body.grammar,
        "logit_bias": biases(body, engine),
        "bad_words": bad_words(body, engine),
        "allowed_tokens": prompt_tokens(body.allowed_token_ids or [], engine, "allowed_token_ids"),
    }


def _check_prompt_logprobs(body: EngineOptions, prompts: Sequence[Tokens]) -> None:
    """Refuse an answer whose probabilities of prompts would take more memory than is spare."""
    if body.prompt_top is None:
        return
    told = (1 + body.prompt_top) * body.choices * sum(map(len, prompts))
    if told > _MAX_PROMPT_LOGPROBS:
        message = f"{told:,} probabilities of prompt tokens: at most {_MAX_PROMPT_LOGPROBS:,}"
        raise InvalidField("prompt", f"{message} in one answer; send shorter or fewer prompts")


def _reserve(ctx: Context, answers: int) -> None:
    """Exchange the request's place in the queue for places of all its answers."""
    places = ctx.engine.info.slots + ctx.settings.queue_size
    if answers > places:
        message = f"prompts times `n` must be at most {places} on this server"
        raise InvalidField("n", message)
    ctx.release()  # no other request comes between
    ctx.release = ctx.app.service.admission.reserve(answers)


async def generate_chat(
    ctx: Context, body: EngineOptions, make: Callable[[], Conversation], *, more: int = 0
) -> Generation:
    """Have the engine continue the conversation that `make` returns.

    Args:
        more: number of bytes that `make` reads besides the body.

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
        engine: counts them.
        more: number of bytes that `make` reads besides the body.

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
    """Return what the engine's requests of one HTTP request have in common, without a prompt."""
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
    """Submit the engine's requests of one HTTP request, in the place that was reserved for it.

    Args:
        requests: all answers to a prompt stand together.
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
    """Return the most tokens of an answer: the client's wish, within the server's limit."""
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
