"""Requests that are sent to an engine at once: what comes of each, and how fast they decode.

A pass may hold chunks of prompts beside requests that decode, so the time of prompts cannot be
taken out pass by pass. What counts as decoding is therefore what happens after the pass that
computed the last prompt: tokens from then on over the time from then on. It ends with the first
request that ends: with the fewer that are left after it a pass is no longer one of so many at once,
and drafts would be blamed for it, since plain requests of one length all end in the same pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specops.engine.engine import Engine
from specops.request import FinishReason, GenerationRequest, GenerationStats, Output, Piece


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request."""

    pieces: tuple[Piece, ...]
    finish: FinishReason
    stats: GenerationStats

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its tokens."""
        return tuple(piece.token for piece in self.pieces)

    @property
    def text(self) -> str:
        """The text of all of it."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that were sent at once."""

    answers: tuple[Answer, ...]
    seconds: float  # from the sending to the last token
    decode_seconds: float  # of them, those in which they decoded
    tokens: int  # decoded in that time, all requests together
    steps: int  # sequence steps in that time, one per request and pass

    @property
    def rate(self) -> float:
        """Decoded tokens per second, all requests together."""
        return self.tokens / self.decode_seconds


def run_together(
    engine: Engine, requests: Sequence[GenerationRequest], *, to_the_last: bool = False
) -> Batch:
    """Send requests at once and run them to their ends.

    Args:
        engine: that runs them.
        requests: their names are of no account.
        to_the_last: what is decoded after the first one has ended counts, too: for answers that
            end where the model ends them, some soon.

    Raises:
        RuntimeError: one of them failed.
    """
    scheduler = engine.scheduler
    outputs: dict[str, list[Output]] = {}
    for number, item in enumerate(requests):
        request = replace(engine.admit(item), request_id=f"bench-{number}")
        outputs[request.request_id] = []
        scheduler.add(request)
    waiting, tokens, steps, counting = len(requests), 0, 0, True
    start = computed = counted = time.perf_counter()
    while scheduler.busy:
        result = scheduler.step()
        for output in result.outputs:
            outputs[output.request_id].append(output)
        stats = result.stats
        if stats is not None and waiting > 0:
            waiting -= stats.first_tokens
            computed = counted = time.perf_counter()
        elif stats is not None and counting:
            tokens += stats.emitted_tokens
            steps += stats.decoding
            counted = time.perf_counter()
        counting &= to_the_last or not any(output.finish for output in result.outputs)
    end = time.perf_counter()
    answers = tuple(_answer(found) for found in outputs.values())
    return Batch(answers, end - start, counted - computed, tokens, steps)


def _answer(outputs: Sequence[Output]) -> Answer:
    last = outputs[-1]
    if last.stats is None or last.finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise RuntimeError(f"a request ended with {last.finish}: {last.error}")
    pieces = tuple(piece for output in outputs for piece in output.pieces)
    return Answer(pieces, last.finish, last.stats)
