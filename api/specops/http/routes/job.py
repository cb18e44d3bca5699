"""A client's request on its way through the engine: the part that all endpoints share."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from fastapi import Request

from specops.config import Settings
from specops.engine.engine import Engine, ModelInfo
from specops.http.choosing import bad_words, biases, compiled, stop_tokens
from specops.http.errors import ApiError, InvalidField, internal_error
from specops.http.routes.unknown import ignore_unknown, ignored_header
from specops.http.schemas.options import EngineOptions
from specops.http.sse import calling_on_disconnect
from specops.http.state import AppState
from specops.request import (
    FIXED_K_DRAFT,
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Logprob,
    Output,
    Piece,
    SamplingParams,
)
from specops.serving.request_handle import RequestHandle

Tokens = tuple[int, ...]
_T = TypeVar("_T")

# Encoding takes a third of a microsecond per character: up to here the event loop can spare it.
_LONG_TEXT = 4096
# One thread: long prompts wait for each other, and the engine keeps its cores.
_ENCODER = ThreadPoolExecutor(1, "encode")
# Chat templates come from strangers, and may take a second for a short text. With a thread of their
# own the event loop has the interpreter back every 5 ms; that costs a chat 40 microseconds.
_RENDERER = ThreadPoolExecutor(1, "render")
_PAUSE_SECONDS = 15.0  # proxies give a silent connection up after 30 to 60
_sequence = itertools.count(1)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a body asks to go on from.

    Attributes:
        encode: makes tokens of it, one item per prompt.
        count: how many there are.
        size: characters, of which encoding takes time.
        shown: the text as given, for a log that shows prompts.
        rendered: a chat template writes them.
    """

    encode: Callable[[Engine], Sequence[Tokens]]
    count: int
    size: int
    shown: Any
    rendered: bool = False

    async def encoded(self, engine: Engine, settings: Settings) -> Sequence[Tokens]:
        """Their tokens; long texts are encoded on a thread.

        Raises:
            ApiError: that took too long.
        """
        return await computed(
            lambda: self.encode(engine), self.size, settings, renders=self.rendered
        )


@dataclass(slots=True)
class Answer:
    """What came of one prompt; complete once `last` is set."""

    request: GenerationRequest
    pieces: list[Piece] = field(default_factory=list)
    prompt: tuple[Logprob | None, ...] = ()  # of the prompt's tokens, where they are told
    last: Output | None = None

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Why it ended, as OpenAI names it."""
        stopped = self.last is not None and self.last.finish is FinishReason.STOP
        return "stop" if stopped else "length"

    @property
    def stats(self) -> GenerationStats:
        """What it cost."""
        return (self.last and self.last.stats) or GenerationStats()


class Job:
    """A request under way: one answer per prompt and choice.

    Attributes:
        answers: what has come so far, in the order of the prompts, each prompt's choices together.
        choices: answers to each prompt.
        request_id: what the client knows it by.
        arrival: of the request, seconds of `time.monotonic()`.
    """

    def __init__(self, handle: RequestHandle, request: Request, choices: int, shown: Any) -> None:
        self.handle = handle
        self.choices = choices
        self.answers = [Answer(item) for item in handle.requests]
        self.request_id: str = request.state.request_id
        self.arrival: float = request.state.arrival
        self._index = {item.request_id: i for i, item in enumerate(handle.requests)}
        self._receive = request.receive
        self._shown = shown
        self._ignored = ignored_header(request)
        request.state.log_fields = self._log_fields

    @property
    def complete(self) -> bool:
        """All answers have ended."""
        return all(answer.last for answer in self.answers)

    @property
    def headers(self) -> dict[str, str]:
        """Where in the queue the request was put, and for how many seconds presumably."""
        position = self.handle.queue_position
        return {
            "x-queue-position": str(position.position),
            "x-estimated-wait": f"{round(position.wait_seconds, 3):g}",
            **self._ignored,
        }

    async def outputs(self) -> AsyncIterator[tuple[int, Output] | None]:
        """Outputs as they come, with the index of their answer; None after a silent while.

        Raises:
            ApiError: one of the answers did not end as it should.
        """
        async for output in self.handle.with_pauses(_PAUSE_SECONDS):
            if output is None:
                yield None
                continue
            index = self._index[output.request_id]
            answer = self.answers[index]
            answer.pieces += output.pieces
            answer.prompt = answer.prompt or output.prompt
            if output.finish:
                answer.last = output
            error = _failure(output, answer.request)
            if error is None:
                yield index, output
                continue
            if output.pieces:
                yield index, replace(output, finish=None)
            raise error

    async def finished(self) -> list[Answer]:
        """Wait for all answers; a client that leaves ends them.

        Raises:
            ApiError: one of them did not end as it should.
        """
        async with calling_on_disconnect(self._receive, self.handle.cancel):
            async for _ in self.outputs():
                pass
        return self.answers

    def _log_fields(self) -> dict[str, Any]:
        """What the log tells of the request when it is over."""
        stats = [answer.stats for answer in self.answers]
        fields: dict[str, Any] = {
            "finish": [answer.last.finish if answer.last else None for answer in self.answers],
            "prompt_tokens": sum(item.prompt_tokens for item in stats),
            "generated_tokens": sum(item.generated_tokens for item in stats),
            "queue_seconds": round(max(item.queue_seconds for item in stats), 4),
            **{
                name.removeprefix("x-").replace("-", "_"): told
                for name, told in self._ignored.items()
            },
        }
        if self._shown is not None:
            fields |= {"prompt": self._shown, "answers": [answer.text for answer in self.answers]}
        return fields


async def start(
    state: AppState,
    request: Request,
    body: EngineOptions,
    prompts: Prompts,
    *,
    sampling: Callable[[int], SamplingParams],
    choices: int = 1,
    skipped: Sequence[str] = (),
    **fields: Any,
) -> Job:
    """Check what the schema cannot, encode the prompts, queue them.

    Args:
        sampling: how the tokens of each choice are drawn.
        choices: answers to each prompt.
        skipped: what is ignored besides unknown fields.
        fields: of the engine's requests.

    Raises:
        InvalidField: a field's value does not suit this server.
        NotReady, QueueFull, PromptTooLong: see `AsyncEngine.submit`.
    """
    service, settings = state.service, state.settings
    engine = service.engine
    ignore_unknown(body, request, settings, skipped)
    places = engine.info.slots + settings.queue_size
    if prompts.count * choices > places:
        message = f"this server takes at most {places} answers at a time: prompts times n"
        raise InvalidField("n", message)
    request.state.release()  # room for one, in exchange for all; no other request comes between
    request.state.release = service.admission.reserve(prompts.count * choices)
    options = _options(body, settings, engine.info)
    ends = stop_tokens(body, engine)
    spelled: dict[str, Any] = {
        "logit_bias": biases(body, engine),
        "bad_words": bad_words(body, engine),
    }
    if (grammar := sampling(0).grammar) is not None:
        await compiled(grammar, body, engine)
    encoded = await prompts.encoded(engine, settings)
    options |= {"ignore_eos": bool(body.ignore_eos), "stop_token_ids": ends}
    options |= {"min_tokens": body.min_tokens or 0, **fields}
    first = replace(plain_request(request, settings), **options)
    requests = [
        replace(first, prompt_tokens=tuple(tokens), sampling=replace(sampling(choice), **spelled))
        for tokens in encoded
        for choice in range(choices)
    ]
    return submitted(state, request, requests, prompts, choices)


def plain_request(request: Request, settings: Settings) -> GenerationRequest:
    """What all that HTTP's request asks of the engine has in common; without a prompt."""
    arrival: float = request.state.arrival
    return GenerationRequest(
        request_id="",
        prompt_tokens=(),
        max_new_tokens=0,
        arrival=arrival,
        deadline=arrival + settings.request_timeout,
        client=request.state.client,
    )


def submitted(
    state: AppState,
    request: Request,
    requests: Sequence[GenerationRequest],
    prompts: Prompts,
    choices: int = 1,
) -> Job:
    """Queue what HTTP's request comes down to, in the place that was kept for it.

    Raises:
        NotReady, QueueFull, PromptTooLong: see `AsyncEngine.submit`.
    """
    # Two clients may send the same X-Request-ID; the engine tells requests apart by theirs.
    named = [
        replace(item, request_id=f"{request.state.request_id}/{next(_sequence)}")
        for item in requests
    ]
    shown = prompts.shown if state.settings.log_prompts else None
    request.state.release()
    return Job(state.service.submit(*named), request, choices, shown)


async def computed(
    work: Callable[[], _T], size: int, settings: Settings, *, renders: bool = False
) -> _T:
    """Do what takes time by the size of a text; for a long one, or a template, on a thread.

    Raises:
        ApiError: that took too long.
    """
    if size < _LONG_TEXT and not renders:
        return work()
    thread = _RENDERER if size < _LONG_TEXT else _ENCODER
    try:
        async with asyncio.timeout(settings.request_timeout):
            return await asyncio.get_running_loop().run_in_executor(thread, work)
    except TimeoutError:
        raise _late("encoded", settings.request_timeout) from None


def output_limit(wanted: int | None, field: str, settings: Settings, *, default: int) -> int:
    """Return the most tokens of an answer.

    Raises:
        InvalidField: the client wants more than the server gives.
    """
    if wanted is not None and wanted > settings.max_new_tokens:
        raise InvalidField(field, f"at most {settings.max_new_tokens} on this server")
    return min(default if wanted is None else wanted, settings.max_new_tokens)


def _options(body: EngineOptions, settings: Settings, info: ModelInfo) -> dict[str, Any]:
    """Fill in the server's defaults and hold the options against its limits."""
    adaptive = body.adaptive is not False
    default = settings.max_k_draft if adaptive else min(FIXED_K_DRAFT, settings.max_k_draft)
    k_draft = default if body.k_draft is None else body.k_draft
    if k_draft > settings.max_k_draft:
        raise InvalidField("k_draft", f"at most {settings.max_k_draft} on this server")
    drafter = body.drafter or info.default_drafter
    if drafter not in info.drafters:
        raise InvalidField("drafter", f"this model has {', '.join(info.drafters)}, not {drafter}")
    return {
        "k_draft": k_draft if drafter != "none" else 0,
        "drafter": drafter,
        "adaptive": adaptive,
    }


def _late(what: str, seconds: float) -> ApiError:
    return ApiError(504, f"not {what} within {seconds:g} seconds", code="timeout")


def _failure(last: Output, request: GenerationRequest) -> ApiError | None:
    """Return the error that a client gets for a request that did not end by itself."""
    match last.finish:
        case FinishReason.TIMEOUT:
            started = last.stats is not None and last.stats.generated_tokens > 0
            what = "finished" if started else "started"
            return _late(what, request.deadline - request.arrival)
        case FinishReason.CANCELLED:  # by the client, who will not read this, or by a shutdown
            return ApiError(503, "the server is shutting down", code="draining")
        case FinishReason.GRAMMAR:
            return ApiError(400, f"the grammar: {last.error}", code="invalid_grammar")
        case FinishReason.ERROR:
            log.error("generation failed", extra={"fields": {"reason": last.error}})
            return internal_error()
    return None
