"""Requests that an engine answers at once: the answer of each, and how fast they decode.

The number of clients stays the same: when one has its answer, the next one asks. A pass may hold
chunks of prompts beside requests that decode, so the time of prompts cannot be taken out pass by
pass. Only passes in which all clients' requests decode and no prompt is read count as decoding.
This leaves out the end, when fewer and fewer requests run. The end would count against speculation,
which lets some answers end early, while plain answers of one length end together.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specops.engine.engine import Engine
from specops.request import FinishReason, GenerationRequest, GenerationStats, Output, Piece


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    pieces: tuple[Piece, ...]
    finish: FinishReason
    stats: GenerationStats

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the answer."""
        return tuple(piece.token for piece in self.pieces)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Batch:
    """Answered requests."""

    answers: tuple[Answer, ...]
    seconds: float  # from the sending to the last token
    decode_seconds: float  # the part in which all decoded and no prompt was read
    tokens: int  # decoded in this part by all requests together
    steps: int  # sequence steps in this part, one per request and pass

    @property
    def rate(self) -> float:
        """Decoded tokens per second, all requests together."""
        return self.tokens / self.decode_seconds


def run_together(
    engine: Engine, requests: Sequence[GenerationRequest], at_once: int | None = None
) -> Batch:
    """Run requests to their ends, in their order.

    Args:
        engine: the engine that runs the requests.
        requests: the requests; they get new ids.
        at_once: number of requests in flight, as long as there are so many; None: all.

    Raises:
        RuntimeError: a request failed.
    """
    scheduler, clients = engine.scheduler, at_once or len(requests)
    outputs: dict[str, list[Output]] = {f"bench-{number}": [] for number in range(len(requests))}
    asked = iter(zip(outputs, requests, strict=True))

    def ask(count: int) -> None:
        for name, request in itertools.islice(asked, count):
            scheduler.add(replace(engine.admit(request), request_id=name))

    tokens, steps, seconds = 0, 0, 0.0
    start = time.perf_counter()
    ask(clients)
    while scheduler.busy:
        begun = time.perf_counter()
        step = scheduler.step()
        took = time.perf_counter() - begun
        for output in step.outputs:
            outputs[output.request_id].append(output)
        ask(sum(output.finish is not None for output in step.outputs))
        if step.decoding == clients and not step.prompt_tokens:
            tokens += step.emitted_tokens
            steps += step.decoding
            seconds += took
    end = time.perf_counter()
    answers = tuple(_answer(found) for found in outputs.values())
    return Batch(answers, end - start, seconds, tokens, steps)


def _answer(outputs: Sequence[Output]) -> Answer:
    last = outputs[-1]
    if last.stats is None or last.finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise RuntimeError(f"a request ended with {last.finish}: {last.error}")
    pieces = tuple(piece for output in outputs for piece in output.pieces)
    return Answer(pieces, last.finish, last.stats)
