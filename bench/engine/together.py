"""Runs concurrent requests on an engine: their answers, and how fast they decode.

The number of clients is constant: when one has its answer, the next one asks. A pass may mix chunks
of prompts with decoding requests, so the time of prompts cannot be subtracted pass by pass. So only
passes in which all clients' requests decode, without any prompt, count as decoding. This also
excludes the end, when fewer and fewer requests run. The end would count against speculation, with
which some answers finish early, while plain answers of one length finish together.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specops.engine.engine import Engine
from specops.request import (
    Draft,
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Output,
    TokenOutput,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    pieces: tuple[TokenOutput, ...]
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
class Promises:
    """The probabilities that drafters promised for their tokens, and the outcomes.

    Attributes:
        counts: by drafter and tenth of the promised probability: the number of draft tokens whose
            predecessors were all accepted, the sum of their promises, and how many were accepted.
    """

    counts: Mapping[tuple[str, int], tuple[int, float, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, draft: Draft) -> Promises:
        """The promises of a verified draft."""
        counts: dict[tuple[str, int], tuple[int, float, int]] = {}
        for place, probability in enumerate(draft.accept_probs):
            key = draft.drafter, min(int(10 * probability), 9)
            made, promised, kept = counts.get(key, (0, 0.0, 0))
            counts[key] = made + 1, promised + probability, kept + (place < draft.accepted)
        return cls(counts)

    def __add__(self, other: Promises) -> Promises:
        """The sum of both."""
        counts = dict(self.counts)
        for key, (made, promised, kept) in other.counts.items():
            before = counts.get(key, (0, 0.0, 0))
            counts[key] = before[0] + made, before[1] + promised, before[2] + kept
        return Promises(counts)

    def most_off(self, often: int) -> float:
        """The largest gap between promise and outcome, where at least `often` tokens count."""
        each = [item for item in self.counts.values() if item[0] >= often]
        return max((abs(promised - kept) / made for made, promised, kept in each), default=0.0)

    def record(self) -> list[dict[str, object]]:
        """The counts, for JSON."""
        return [
            {"source": source, "tenth": tenth, "made": made, "promised": promised, "kept": kept}
            for (source, tenth), (made, promised, kept) in sorted(self.counts.items())
        ]


@dataclass(frozen=True, slots=True)
class Batch:
    """Answered requests."""

    answers: tuple[Answer, ...]
    seconds: float  # from sending to the last token
    decode_seconds: float  # in passes in which all requests decoded, without prompts
    tokens: int  # decoded in these passes by all requests together
    steps: int  # sequence steps in these passes, one per request and pass
    promises: Promises = field(default_factory=Promises)

    @property
    def rate(self) -> float:
        """Decoded tokens per second, all requests together."""
        return self.tokens / self.decode_seconds


def run_together(
    engine: Engine, requests: Sequence[GenerationRequest], at_once: int | None = None
) -> Batch:
    """Run requests to their ends, in order.

    Args:
        engine: the engine that runs the requests.
        requests: the requests; they get new ids.
        at_once: number of concurrent requests; None: all.

    Raises:
        RuntimeError: a request failed.
    """
    scheduler, clients = engine.scheduler, at_once or len(requests)
    outputs: dict[str, list[Output]] = {f"bench-{number}": [] for number in range(len(requests))}
    asked = iter(zip(outputs, requests, strict=True))

    def ask(count: int) -> None:
        for name, request in itertools.islice(asked, count):
            scheduler.add(replace(engine.admit(request), request_id=name))

    tokens, steps, seconds, drafts = 0, 0, 0.0, list[Draft]()
    gc.freeze()  # as in a server: otherwise a full collection visits all earlier answers: 0.2 s
    start = time.perf_counter()
    ask(clients)
    while scheduler.busy:
        begun = time.perf_counter()
        step = scheduler.step()
        took = time.perf_counter() - begun
        drafts += step.drafts
        for output in step.outputs:
            outputs[output.request_id].append(output)
        ask(sum(output.finish is not None for output in step.outputs))
        if step.decoding == clients and not step.prompt_tokens:
            tokens += step.emitted_tokens
            steps += step.decoding
            seconds += took
    end = time.perf_counter()
    answers = tuple(_answer(found) for found in outputs.values())
    promises = sum(map(Promises.of, drafts), Promises())
    return Batch(answers, end - start, seconds, tokens, steps, promises)


def _answer(outputs: Sequence[Output]) -> Answer:
    last = outputs[-1]
    if last.stats is None or last.finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise RuntimeError(f"a request ended with {last.finish}: {last.error}")
    pieces = tuple(piece for output in outputs for piece in output.pieces)
    return Answer(pieces, last.finish, last.stats)
