"""One HTTP request on its way through the engine, and its answers so far."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specops.http.answering.speech import Speech
from specops.http.answering.unknown import ignored_header
from specops.http.errors import ApiError, internal_error, too_late, unavailable
from specops.http.sse import calling_on_disconnect
from specops.http.state import Context
from specops.request import (
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Logprob,
    Output,
    Piece,
)
from specops.serving.request_handle import RequestHandle
from specops.text.tools.reader import AnswerReader, Block, Delta

_PAUSE_SECONDS = 15.0  # proxies close a silent connection after 30 to 60
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answer:
    """One answer so far; it is complete once `last` is set.

    Attributes:
        reader: finds text, thoughts and calls in the answer to a chat.
        prompt: log-probabilities of the prompt's tokens, if the client wants them.
        last: the output with the finish reason.
    """

    request: GenerationRequest
    reader: AnswerReader | None = None
    pieces: list[Piece] = field(default_factory=list)
    prompt: tuple[Logprob | None, ...] = ()
    last: Output | None = None

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def told_tokens(self) -> int:
        """Number of tokens that the answer tells of: its own, the likely ones beside each."""
        likely = 1 + (self.request.logprobs or 0)
        return (len(self.pieces) + len(self.prompt)) * likely

    @property
    def blocks(self) -> list[Block]:
        """Text, thoughts and calls of the answer to a chat, so far."""
        return self.reader.blocks if self.reader else []

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of the thoughts, by their share of the characters."""
        thought = sum(len(block.text) for block in self.blocks if block.kind == "reasoning")
        whole = sum(len(block.text) for block in self.blocks)
        return self.stats.generated_tokens * thought // max(1, whole)

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
    def stats(self) -> GenerationStats:
        """What the answer cost."""
        return (self.last and self.last.stats) or GenerationStats()


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the engine brought for one answer.

    Attributes:
        index: of the answer.
        output: the engine's output.
        deltas: new text of the answer's blocks, in a chat.
    """

    index: int
    output: Output
    deltas: Sequence[Delta] = ()


class Job:
    """A request under way: one answer per prompt and choice.

    Attributes:
        answers: the answers so far, in the order of the prompts, a prompt's choices together.
        choices: number of answers to each prompt.
        request_id: the id that the client knows.
        arrival: of the request, in seconds of `time.monotonic()`.
    """

    def __init__(
        self,
        handle: RequestHandle,
        ctx: Context,
        choices: int,
        shown: Any,
        speech: Speech | None,
    ) -> None:
        self.handle = handle
        self.choices = choices
        self.answers = [
            Answer(item, speech.reader() if speech else None) for item in handle.requests
        ]
        self.request_id = ctx.request_id
        self.arrival = ctx.arrival
        self._speech = speech
        self._index = {item.request_id: i for i, item in enumerate(handle.requests)}
        self._receive = ctx.receive
        self._shown = shown
        self._ignored = ignored_header(ctx)
        ctx.log_fields = self._log_fields

    @property
    def complete(self) -> bool:
        """All answers have ended."""
        return all(answer.last for answer in self.answers)

    @property
    def headers(self) -> dict[str, str]:
        """The request's place in the queue, its estimated wait in seconds, and ignored fields."""
        position = self.handle.queue_position
        return {
            "x-queue-position": str(position.position),
            "x-estimated-wait": f"{round(position.wait_seconds, 3):g}",
            **self._ignored,
        }

    async def steps(self) -> AsyncIterator[Step | None]:
        """Yield each step as it comes; None after a long silence.

        Raises:
            ApiError: one of the answers failed.
        """
        async for made in self.handle.with_pauses(_PAUSE_SECONDS):
            if made is None:
                yield None
                continue
            index = self._index[made.request_id]
            answer = self.answers[index]
            output, deltas = self._read(answer, made)
            answer.pieces += output.pieces
            answer.prompt = answer.prompt or output.prompt
            if output.finish:
                answer.last = output
            error = _failure(output, answer.request)
            if error is None:
                if output.finish and answer.reader:
                    deltas += answer.reader.finish()
                yield Step(index, output, deltas)
                continue
            if output.pieces:
                yield Step(index, replace(output, finish=None), deltas)
            raise error

    def _read(self, answer: Answer, output: Output) -> tuple[Output, list[Delta]]:
        """Read the text of an output; end the answer where it begins to repeat its calls.

        Returns:
            The output up to there, and its deltas.
        """
        reader, speech = answer.reader, self._speech
        if reader is None or speech is None:
            return output, []
        if reader.repeated:  # the engine has not ended it yet when it made this output
            pieces, deltas = (), []
        else:
            deltas = reader.push(speech.text(output.pieces))
            if not reader.repeated:
                return output, deltas
            pieces = speech.without(output.pieces, reader.unread)
            if not output.finish:
                self.handle.end(output.request_id)
        if not output.finish:
            return replace(output, pieces=pieces), deltas
        # However the engine ended it, the answer was whole before.
        tokens = len(answer.pieces) + len(pieces)
        stats = output.stats and replace(output.stats, generated_tokens=tokens)
        ended = replace(output, finish=FinishReason.STOP, error=None, stop=None)
        return replace(ended, pieces=pieces, stats=stats), deltas

    async def finished(self) -> list[Answer]:
        """Wait for all answers; a client that leaves ends them.

        Raises:
            ApiError: one of the answers failed.
        """
        async with calling_on_disconnect(self._receive, self.handle.cancel):
            async for _ in self.steps():
                pass
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
        for name, value in self._ignored.items():
            fields[name.removeprefix("x-").replace("-", "_")] = value
        if self._shown is not None:
            fields |= {"prompt": self._shown, "answers": [answer.text for answer in self.answers]}
        return fields


def _failure(last: Output, request: GenerationRequest) -> ApiError | None:
    """Return the error for the client of a request that failed; None where it did not."""
    match last.finish:
        case FinishReason.TIMEOUT:
            started = last.stats is not None and last.stats.generated_tokens > 0
            what = "finished" if started else "started"
            return too_late(what, request.deadline - request.arrival)
        case FinishReason.CANCELLED:  # a shutdown, or a client that left and will not read this
            return unavailable("the server is shutting down", "draining")
        case FinishReason.GRAMMAR:
            return ApiError(400, f"the grammar: {last.error}", code="invalid_grammar")
        case FinishReason.ERROR:
            log.error("generation failed", extra={"fields": {"reason": last.error}})
            return internal_error()
    return None
