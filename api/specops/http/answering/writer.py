"""Reads the answers to one HTTP request from the engine, and writes them in one protocol."""

import asyncio
import logging
import secrets
import string
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from specops.http.answering.prompt import AnswerFormat
from specops.http.answering.schema import answer_headers
from specops.http.errors import ApiError, internal_error, timeout_error, unavailable
from specops.http.sse import PAUSE, EventStream, calling_on_disconnect
from specops.http.state import Context
from specops.request import (
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Logprob,
    Output,
    TokenOutput,
)
from specops.serving.request_handle import RequestHandle
from specops.text.json_values import dumps, loads
from specops.text.tokenizer import Tokenizer
from specops.text.tools.blocks import Block, Delta
from specops.text.tools.reader import AnswerReader

# -- probabilities ---------------------------------------------------------------------------------
# In the form of OpenAI's chats and Ollama; those of prompts in vLLM's form.


class TopLogprob(BaseModel):
    """A token that was possible at this position."""

    token: str
    logprob: float = Field(description="natural logarithm of its probability")
    bytes: list[int] = Field(description="UTF-8; a token may be part of a character")


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


def token_name(token: int, tokenizer: Tokenizer, *, as_id: bool) -> str:
    """Return a token's text, or its number in vLLM's form, as texts of tokens may be equal.

    Args:
        token: the token's number.
        tokenizer: the model's tokenizer.
        as_id: whether to write `token_id:NUMBER`.
    """
    return f"token_id:{token}" if as_id else tokenizer.spelling(token)[0]


def prompt_logprobs(
    tokens: Sequence[int], told: Sequence[Logprob | None], top: int, tokenizer: Tokenizer
) -> Iterator[dict[str, Any] | None]:
    """Yield a prompt's log-probabilities in vLLM's form: each token's, and the likeliest tokens'.

    They are made one by one while the JSON is written: together they would take ten times its size.

    Args:
        tokens: the prompt's tokens.
        told: their log-probabilities.
        top: number of likeliest tokens to report.
        tokenizer: the model's tokenizer.
    """
    for token, one in zip(tokens, told, strict=False):
        if one is None:
            yield None
            continue
        ranked = {token: (one.chosen, one.rank)}
        ranked |= {item: (value, at) for at, (item, value) in enumerate(one.top[:top], 1)}
        yield {
            str(item): {
                "logprob": value,
                "rank": rank,
                "decoded_token": tokenizer.spelling(item)[0],
            }
            for item, (value, rank) in ranked.items()
        }


def token_logprobs(
    pieces: Sequence[TokenOutput], tokenizer: Tokenizer, *, as_ids: bool = False
) -> list[TokenLogprob]:
    """Return the tokens' log-probabilities; an empty list if they were not requested.

    Args:
        pieces: the tokens, in order.
        tokenizer: the model's tokenizer.
        as_ids: see `token_name`.
    """
    logprobs = []
    for piece in pieces:
        if piece.logprob is not None:
            top = [_top(token, value, tokenizer, as_ids) for token, value in piece.logprob.top]
            chosen = _top(piece.token, piece.logprob.chosen, tokenizer, as_ids)
            logprobs.append(TokenLogprob(**chosen.model_dump(), top_logprobs=top))
    return logprobs


def _top(token: int, logprob: float, tokenizer: Tokenizer, as_id: bool) -> TopLogprob:
    name, encoded = token_name(token, tokenizer, as_id=as_id), tokenizer.spelling(token)[1]
    return TopLogprob(token=name, logprob=logprob, bytes=list(encoded))


# -- answers ---------------------------------------------------------------------------------------

HEARTBEAT_SECONDS = 15.0  # proxies close a silent connection after 30 to 60
_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates accept no other length
FOUND_IN = (
    "accepted draft tokens by source: `text` (the request's), `history` (the client's earlier "
    "requests), `table` (n-grams), `head`, `draft` (a draft model) or `grammar`"
)
log = logging.getLogger(__name__)
_LONG = 1024  # tokens and alternatives, which the event loop writes in about 4 ms
_T = TypeVar("_T")


@dataclass(slots=True)
class Answer:
    """One answer so far; it is complete once `last` is set.

    Attributes:
        request: the engine's request.
        reader: finds text, reasoning and calls in the answer to a chat.
        pieces: its tokens so far.
        prompt: log-probabilities of the prompt's tokens, if requested.
        last: the output with the finish reason.
        stats: its statistics, at its end, or so far if requested.
        prompt_computed: tokens of the prompt so far, if the last step reported its progress.
    """

    request: GenerationRequest
    reader: AnswerReader | None = None
    pieces: list[TokenOutput] = field(default_factory=list)
    prompt: Sequence[Logprob | None] = ()
    last: Output | None = None
    stats: GenerationStats = field(default_factory=GenerationStats)
    prompt_computed: int = 0

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def reported_tokens(self) -> int:
        """Number of tokens in the answer, with the alternatives of each."""
        asked = self.request
        likely = max(asked.logprobs or 0, len(asked.logprob_tokens)), asked.prompt_logprobs or 0
        return len(self.pieces) * (1 + likely[0]) + len(self.prompt) * (1 + likely[1])

    @property
    def blocks(self) -> list[Block]:
        """Text, reasoning and calls of the answer to a chat, so far."""
        return self.reader.blocks if self.reader else []

    @property
    def reasoning_tokens(self) -> int:
        """Number of reasoning tokens, by the reasoning's share of the characters."""
        reasoning = sum(len(block.text) for block in self.blocks if block.kind == "reasoning")
        whole = sum(len(block.text) for block in self.blocks)
        return self.generated_tokens * reasoning // max(1, whole)

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Why the answer ended, in OpenAI's words."""
        stopped = self.last is not None and self.last.finish is FinishReason.STOP
        return "stop" if stopped else "length"

    @property
    def chat_finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Why the answer to a chat ended, in OpenAI's words."""
        called = any(block.kind == "call" for block in self.blocks)
        return "tool_calls" if called and self.finish_reason == "stop" else self.finish_reason

    @property
    def generated_tokens(self) -> int:
        """Number of tokens so far; before the end, without those whose text is held back."""
        return self.stats.generated_tokens if self.last else len(self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step of the engine for one answer.

    Attributes:
        index: the answer's index.
        output: the engine's output.
        deltas: new text of the answer's blocks, in a chat.
    """

    index: int
    output: Output
    deltas: Sequence[Delta] = ()


class Generation:
    """A submitted request: one answer per prompt and choice.

    Args:
        handle: the engine's requests.
        ctx: the HTTP request's context.
        choices: number of answers to each prompt.
        logged_prompt: the prompts for the log; None: it shows none.
        answer_format: how a chat model writes its answers; None: as plain text.

    Attributes:
        handle: the engine's requests.
        answers: the answers so far, in the order of the prompts, a prompt's choices together.
        choices: number of answers to each prompt.
        request_id: the id that the client knows.
        arrival: when the request arrived, in seconds of `time.monotonic()`.
    """

    def __init__(
        self,
        handle: RequestHandle,
        ctx: Context,
        choices: int,
        logged_prompt: Any,
        answer_format: AnswerFormat | None,
    ) -> None:
        self.handle = handle
        self.choices = choices
        self._thread = ctx.app.executors.writing
        self.answers = [
            Answer(item, answer_format.reader() if answer_format else None)
            for item in handle.requests
        ]
        self.request_id = ctx.request_id
        self.arrival = ctx.arrival
        self._answer_format = answer_format
        self._index = {item.request_id: i for i, item in enumerate(handle.requests)}
        self._receive = ctx.receive
        self._logged_prompt = logged_prompt
        self._named = answer_headers(ctx)
        self._ignored = ", ".join(ctx.ignored)
        ctx.log_fields = self._log_fields

    @property
    def complete(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.last for answer in self.answers)

    @property
    def headers(self) -> dict[str, str]:
        """Place in the queue, estimated wait in seconds, the model, and ignored fields."""
        position = self.handle.queue_position
        return {
            "x-queue-position": str(position.position),
            "x-estimated-wait": f"{round(position.wait_seconds, 3):g}",
            **self._named,
        }

    async def steps(self) -> AsyncIterator[Iterator[Step]]:
        """Yield the steps so far, as they come; an empty iterator after a long silence.

        Each step changes the answers when it is iterated, so that its writer sees no later one.

        Raises:
            ApiError: one of the answers failed; its step raises it.
        """
        async for outputs in self.handle.outputs(HEARTBEAT_SECONDS):
            yield self._taken(outputs)

    def _taken(self, outputs: Iterable[Output]) -> Iterator[Step]:
        for made in outputs:
            index = self._index[made.request_id]
            answer = self.answers[index]
            output, deltas = self._read(answer, made)
            answer.pieces += output.pieces
            answer.prompt = answer.prompt or output.prompt
            answer.stats = output.stats or answer.stats
            answer.prompt_computed = output.prompt_computed
            if output.finish:
                answer.last = output
                if error := _failure(output, answer.request):
                    if output.pieces:
                        yield Step(index, replace(output, finish=None), deltas)
                    raise error
                if answer.reader:
                    deltas += answer.reader.finish()
            yield Step(index, output, deltas)

    def _read(self, answer: Answer, output: Output) -> tuple[Output, list[Delta]]:
        """Read an output's text; end the answer when it begins to repeat its calls.

        Returns:
            The output up to there, and its deltas.
        """
        reader, answer_format = answer.reader, self._answer_format
        if reader is None or answer_format is None:
            return output, []
        if reader.repeated:  # the engine made this output before it ended the answer
            pieces, deltas = (), []
        else:
            deltas = reader.push(*answer_format.texts(output.pieces))
            if not reader.repeated:
                return output, deltas
            pieces = answer_format.without(output.pieces, reader.unread)
            if not output.finish:
                self.handle.end(output.request_id)
        if not output.finish:
            return replace(output, pieces=pieces), deltas
        # However the engine ended it, the answer was complete before.
        tokens = len(answer.pieces) + len(pieces)
        stats = output.stats and replace(output.stats, generated_tokens=tokens)
        ended = replace(output, finish=FinishReason.STOP, error=None, stop=None)
        return replace(ended, pieces=pieces, stats=stats), deltas

    async def written(self, work: Callable[[], _T], tokens: int) -> _T:
        """Write an answer, on a thread if it is long.

        Args:
            work: writes the answer.
            tokens: number of tokens in it.
        """
        if tokens < _LONG:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def finished(self) -> list[Answer]:
        """Wait for all answers; a client that leaves ends them.

        Raises:
            ApiError: one of the answers failed.
        """
        async with calling_on_disconnect(self._receive, self.handle.cancel):
            async for steps in self.steps():
                deque(steps, 0)
        return self.answers

    def _log_fields(self) -> dict[str, Any]:
        """Return the fields of the log line at the request's end."""
        stats = [answer.stats for answer in self.answers]
        fields: dict[str, Any] = {
            "finish": [answer.last.finish if answer.last else None for answer in self.answers],
            "prompt_tokens": sum(item.prompt_tokens for item in stats),
            "generated_tokens": sum(item.generated_tokens for item in stats),
            "queue_seconds": round(max(item.queue_seconds for item in stats), 4),
        }
        if self._ignored:
            fields["ignored_fields"] = self._ignored
        if self._logged_prompt is not None:
            fields |= {
                "prompt": self._logged_prompt,
                "answers": [answer.text for answer in self.answers],
            }
        return fields


def _failure(last: Output, request: GenerationRequest) -> ApiError | None:
    """Return the error for the client of a failed request; None if it did not fail."""
    match last.finish:
        case FinishReason.TIMEOUT:
            started = last.stats is not None and last.stats.generated_tokens > 0
            what = "finished" if started else "started"
            return timeout_error(what, request.deadline - request.arrival)
        case FinishReason.CANCELLED:  # a shutdown, or a client that left and will not read this
            return unavailable("the server is shutting down", "draining")
        case FinishReason.GRAMMAR:
            return ApiError(400, f"the grammar: {last.error}", code="invalid_grammar")
        case FinishReason.ERROR:
            log.error("generation failed", extra={"fields": {"reason": last.error}})
            return internal_error()
    return None


def json_of(content: BaseModel, *, exclude_none: bool = False) -> bytes:
    """Return a schema's JSON, written in pieces if it has lists of schemas.

    pydantic holds Python's global lock until it has written everything: too long for the choices of
    a request with the probabilities of all their tokens.
    """
    lists = {name: value for name, value in content if _is_list_of_schemas(value)}
    rest = content.model_dump_json(exclude_none=exclude_none, exclude=set(lists))
    fields = [rest[1:-1]] if rest != "{}" else []
    for name, items in lists.items():
        texts = [item.model_dump_json(exclude_none=exclude_none) for item in items]
        fields.append(f'"{name}":[{",".join(texts)}]')
    return f"{{{','.join(fields)}}}".encode()


def _is_list_of_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], BaseModel)


def json_answer(
    content: BaseModel, headers: Mapping[str, str], *, exclude_none: bool = False
) -> Response:
    """Return a response with a schema's JSON.

    Args:
        content: the body's content.
        headers: the response's headers.
        exclude_none: whether to leave out fields that are null.
    """
    text = json_of(content, exclude_none=exclude_none)
    return Response(text, headers=dict(headers), media_type="application/json")


def list_answer(
    rest: Mapping[str, Any] | None, field: str, items: Iterable[bytes], headers: Mapping[str, str]
) -> Response:
    """Return a response with a list, written item by item so that the event loop is never held up.

    Args:
        rest: the other fields; None: the answer is only the list.
        field: name of the list, which comes last.
        items: JSON of one or several items each; each is made after the last one was sent.
        headers: the response's headers.
    """

    async def written() -> AsyncIterator[bytes]:
        begin = b"" if rest is None else dumps(rest)[:-1] + (b"," if rest else b"")
        yield begin + (b"[" if rest is None else f'"{field}":['.encode())
        for index, item in enumerate(items):
            yield b"," + item if index else item
            await asyncio.sleep(0)  # a fast client never makes the server wait
        yield b"]" if rest is None else b"]}"

    return StreamingResponse(written(), headers=dict(headers), media_type="application/json")


class Writer:
    """Writes a generation's answers in the form of one protocol.

    Attributes:
        media_type: media type of a stream.
        pause: the heartbeat of a stream after a long silence.
        exclude_none: whether an answer in one piece leaves out fields without a value.
        generation: the answers.
    """

    media_type: ClassVar[str] = "text/event-stream"
    pause: ClassVar[bytes] = PAUSE
    exclude_none: ClassVar[bool] = False

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def whole(self) -> BaseModel:
        """Return the body of an answer in one piece, once the generation is finished."""
        raise NotImplementedError

    def whole_json(self) -> bytes:
        """Return the JSON of an answer in one piece."""
        return json_of(self.whole(), exclude_none=self.exclude_none)

    def step(self, step: Step) -> bytes:
        """Return the events of one step; none if the step has nothing to show."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Return the events that end a stream."""
        raise NotImplementedError

    def failed(self, error: ApiError) -> bytes:
        """Return the events that end a stream after a failure, or raise the error.

        A raised error becomes the response, or the stream's last event if the stream has begun.
        """
        raise error

    async def response(self, *, stream: bool) -> Response:
        """Send the answers.

        Args:
            stream: send events as they come; otherwise one body at the end.

        Raises:
            ApiError: an answer in one piece failed.
        """
        generation, headers = self.generation, self.generation.headers
        if stream:
            leave = generation.handle.cancel
            return EventStream(self._events(), leave, headers, media_type=self.media_type)
        tokens = sum(answer.reported_tokens for answer in await generation.finished())
        text = await generation.written(self.whole_json, tokens)
        return Response(text, headers=headers, media_type="application/json")

    async def _events(self) -> AsyncGenerator[bytes, None]:
        failure: Exception | None = None
        async for steps in self.generation.steps():
            events, silent = [], True
            try:
                for step in steps:
                    work, tokens = partial(self.step, step), step.output.reported_tokens
                    silent = False
                    events.append(await self.generation.written(work, tokens))
            except Exception as error:  # earlier events go out first
                silent, failure = False, error
            if written := self.pause if silent else b"".join(events):
                yield written
            if isinstance(failure, ApiError):
                yield self.failed(failure)
                return
            if failure is not None:
                raise failure
        yield self.end()


class BlockWriter(Writer):
    """Streams a single answer to a chat as blocks: text, reasoning and calls, one after the other.

    Attributes:
        answer: the answer.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        (self.answer,) = generation.answers
        self._open: int | None = None  # index of the current block
        self._begun = False

    def step(self, step: Step) -> bytes:
        """Return the events of one step: blocks that begin, grow and end."""
        events = b"" if self._begun else self.begin()
        self._begun = True
        for index, text in step.deltas:
            if index != self._open:
                events += self.end_open_block() + self.begin_block(index)
                self._open = index
            if text:
                events += self.block_delta(index, text)
        return events

    def end_open_block(self, *, complete: bool = True) -> bytes:
        """Return the events that end the open block, if there is one.

        Args:
            complete: whether the block is complete: the answer was not cut off within it.
        """
        return b"" if self._open is None else self.end_block(self._open, complete=complete)

    def begin(self) -> bytes:
        """Return the events that begin the stream."""
        raise NotImplementedError

    def begin_block(self, index: int) -> bytes:
        """Return the events that begin a block."""
        raise NotImplementedError

    def block_delta(self, index: int, text: str) -> bytes:
        """Return the event of new text of a block."""
        raise NotImplementedError

    def end_block(self, index: int, *, complete: bool) -> bytes:
        """Return the events that end a block."""
        raise NotImplementedError


def call_id() -> str:
    """Return an id for a new call."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


def token_events(output: Output) -> list[dict[str, Any]]:
    """Return the tokens of a step, each with its `id`, `text` and `origin`.

    A token's text is empty while a character is incomplete. Its origin is `target`, the drafter
    whose draft token was accepted, or `grammar`.
    """
    # Not a pydantic model: that takes five times as long, and this runs in every step.
    return [
        {"id": piece.token, "text": piece.text, "origin": piece.origin} for piece in output.pieces
    ]


def joined_text(blocks: Iterable[Block], kind: str) -> str:
    """Return the text of all blocks of a kind, separated by empty lines."""
    return "\n\n".join(block.text for block in blocks if block.kind == kind)


def arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; empty if the answer was cut off within them."""
    try:
        value = loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
