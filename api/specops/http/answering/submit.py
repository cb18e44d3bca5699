"""Submitting an HTTP request's prompts to the engine, after the checks that a schema cannot do."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from specops.config import Settings
from specops.engine.model_info import ModelInfo
from specops.http.answering.choosing import (
    bad_words,
    biases,
    compile_grammar,
    prompt_tokens,
)
from specops.http.answering.job import Job
from specops.http.answering.speech import Speech
from specops.http.answering.unknown import ignore_keywords, ignore_unknown
from specops.http.body_limits import LARGE_BODY_BYTES
from specops.http.errors import InvalidField, too_late, unavailable
from specops.http.schemas.options import EngineOptions
from specops.http.state import Context
from specops.request import FIXED_K_DRAFT, GenerationRequest
from specops.text.fill_in import FillIn

Tokens = tuple[int, ...]
_T = TypeVar("_T")

# Encoding takes a third of a microsecond per character: the event loop can wait for so many.
_LONG_TEXT = 4096
# One thread: long prompts wait for each other, and the engine keeps its cores.
_ENCODER = ThreadPoolExecutor(1, "encode")
# Chat templates come from strangers, and may take a second for a short text. This thread waits for
# the process that renders them.
_RENDERER = ThreadPoolExecutor(1, "render")
# Texts of requests that hold no place in the queue. Each is kept, with its body, until a thread
# takes it, and chats wait behind it: a text of 1 MiB takes a third of a second.
_MOST_ASIDE = 8
_aside = threading.BoundedSemaphore(_MOST_ASIDE)
_sequence = itertools.count(1)


async def start(
    ctx: Context,
    body: EngineOptions,
    encode: Callable[[], Sequence[Tokens]],
    *,
    size: int,
    shown: Any,
    count: int = 1,
    rendered: bool = False,
    speech: Speech | None = None,
    skipped: Sequence[str] = (),
    gap: FillIn | None = None,
    prompt_logprobs: bool = False,
) -> Job:
    """Check what the schema cannot check, encode the prompts, and submit them to the engine.

    Args:
        encode: returns the tokens of each prompt.
        size: number of characters of the prompts.
        shown: the prompts as the client sent them, for a log that shows prompts.
        count: number of prompts.
        rendered: a chat template writes the prompts.
        speech: how a chat model writes the answers.
        skipped: names of ignored parts of the body, besides unknown fields.
        gap: how the model is asked to fill in a gap.
        prompt_logprobs: report log-probabilities of the prompts' tokens.

    Raises:
        InvalidField: this server cannot use a field's value.
        NotReady, QueueFull, PromptTooLong, UnknownToken: see `AsyncEngine.submit`.
    """
    engine, settings = ctx.engine, ctx.settings
    ignore_unknown(ctx, body, skipped)
    places, answers = engine.info.slots + settings.queue_size, count * body.choices
    if answers > places:
        message = f"this server takes at most {places} answers at a time: prompts times n"
        raise InvalidField("n", message)
    # Exchange the place of one for places of all answers; no other request comes between.
    ctx.release()
    ctx.release = ctx.app.service.admission.reserve(answers)
    grammar = await built(ctx, lambda: speech.grammar(body.grammar) if speech else body.grammar)
    stop_tokens = prompt_tokens(body.stop_token_ids or [], engine, "stop_token_ids")
    common = replace(
        plain_request(ctx),
        **_drafting(body, settings, engine.info),
        max_new_tokens=_limit(body, settings),
        stop=(*body.stops, *(gap.ends if gap else ())),
        stop_token_ids=(*stop_tokens, *(gap.ends.values() if gap else ())),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.token_logprobs,
        prompt_logprobs=prompt_logprobs,
        stream=body.streams,
    )
    written = sum(map(len, (*(body.bad_words or ()), *(body.logit_bias or ()))))
    spelled: dict[str, Any] = {
        "grammar": grammar,
        "logit_bias": await computed(ctx, lambda: biases(body, engine), written),
        "bad_words": await computed(ctx, lambda: bad_words(body, engine), written),
    }
    if grammar is not None:
        # Held until the answer ends: it keeps the grammar compiled while the request waits.
        matcher = ctx.matcher = await compile_grammar(grammar, body, engine)
        ignore_keywords(ctx, matcher.left_out, body.grammar_field)
    advised = engine.info.sampling
    sampling = [
        replace(body.sampling(choice, advised), **spelled) for choice in range(body.choices)
    ]
    requests = [
        replace(common, prompt_tokens=tuple(tokens), sampling=one)
        for tokens in await computed(ctx, encode, size, renders=rendered)
        for one in sampling
    ]
    return submitted(ctx, requests, shown=shown, choices=body.choices, speech=speech)


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


def submitted(
    ctx: Context,
    requests: Sequence[GenerationRequest],
    *,
    shown: Any,
    choices: int = 1,
    speech: Speech | None = None,
) -> Job:
    """Submit the engine's requests of one HTTP request, in the place that was reserved for it.

    Raises:
        NotReady, QueueFull, PromptTooLong, UnknownToken: see `AsyncEngine.submit`.
    """
    # Two clients may send the same X-Request-ID: the engine needs ids of its own.
    named = [replace(item, request_id=f"{ctx.request_id}/{next(_sequence)}") for item in requests]
    ctx.release()
    handle = ctx.app.service.submit(*named)
    return Job(handle, ctx, choices, shown if ctx.settings.log_prompts else None, speech)


async def computed(ctx: Context, work: Callable[[], _T], size: int, *, renders: bool = False) -> _T:
    """Do work that takes time in proportion to a text; on a thread if that may be long.

    Args:
        size: number of characters.
        renders: a chat template takes part.

    Raises:
        ApiError: the work took too long.
    """
    if size < _LONG_TEXT and not renders:
        return work()
    thread = _RENDERER if size < _LONG_TEXT else _ENCODER
    try:
        async with asyncio.timeout(ctx.settings.request_timeout):
            return await asyncio.get_running_loop().run_in_executor(thread, work)
    except TimeoutError:
        raise too_late("encoded", ctx.settings.request_timeout) from None


async def built(ctx: Context, work: Callable[[], _T], *, besides: int = 0) -> _T:
    """Do work that takes time by the parts of a request's body; on a thread if that is large.

    Args:
        besides: number of bytes that are read besides the body.

    Raises:
        ApiError: the work took too long.
    """
    size = ctx.body_bytes + besides
    return await computed(ctx, work, size if size > LARGE_BODY_BYTES else 0)


async def computed_aside(
    ctx: Context, work: Callable[[], _T], size: int, *, renders: bool = False
) -> _T:
    """Do such work for a request that holds no place in the queue.

    Raises:
        ApiError: the work took too long, or too many such requests wait already.
    """
    if not _aside.acquire(blocking=False):
        raise unavailable(f"{_MOST_ASIDE} texts are being encoded or decoded", "texts")
    try:
        return await computed(ctx, work, size, renders=renders)
    finally:
        _aside.release()


def _limit(body: EngineOptions, settings: Settings) -> int:
    """Return the most tokens of an answer: the client's wish, within the server's limit."""
    most, limit = settings.max_new_tokens, body.limit
    if limit is None or limit <= most:
        return most if limit is None else limit
    if body.strict_limit and body.limit_field in body.model_fields_set:
        raise InvalidField(body.limit_field, f"at most {most} on this server")
    return most


def _drafting(body: EngineOptions, settings: Settings, info: ModelInfo) -> dict[str, Any]:
    """Return the drafting options, with the server's defaults and within its limits."""
    adaptive = body.adaptive is not False
    default = settings.max_k_draft if adaptive else min(FIXED_K_DRAFT, settings.max_k_draft)
    k_draft = default if body.k_draft is None else body.k_draft
    if k_draft > settings.max_k_draft:
        raise InvalidField("k_draft", f"at most {settings.max_k_draft} on this server")
    drafter = body.drafter or info.default_drafter
    if drafter not in info.drafters:
        raise InvalidField("drafter", f"this model has {', '.join(info.drafters)}, not {drafter}")
    k_draft = k_draft if drafter != "none" else 0
    return {"k_draft": k_draft, "drafter": drafter, "adaptive": adaptive}
