"""A request on its way through the engine: its tokens, its text, its counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from specops.request import (
    TARGET,
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Output,
    Piece,
)
from specops.runtime.sampling import Floats, logprob, next_token
from specops.speculation.acceptance import SpeculationState
from specops.text.text_stream import TextStream
from specops.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Counts:
    sequence_steps: int = 0
    drafts: int = 0
    draft_misses: int = 0
    draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)


class Sequence:
    """One request in flight. Owned by the engine thread.

    Attributes:
        request: what was asked for.
        tokens: prompt and generated tokens.
        num_computed: how many of them the target's cache holds.
        cached: how many of the prompt's it held already, from another request.
        begun: a pass was made for it since it got its slot.
        slot: its place in the caches' block tables; meaningless while it waits.
        preemptions: how often it gave its KV blocks up.
        finish: set once the request has ended.
        speculation: what its drafts have been worth.
        rng: random numbers of a request without a seed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        *,
        end_tokens: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self.tokens = list(request.prompt_tokens)
        self.num_computed = self.cached = 0
        self.begun = False
        self.slot = 0
        self.preemptions = 0
        self.finish: FinishReason | None = None
        self.speculation = SpeculationState()
        self.rng = np.random.default_rng()
        self._end_tokens = frozenset() if request.ignore_eos else end_tokens
        self._text = TextStream(tokenizer, request.prompt_tokens, request.stop)
        self._pieces: list[Piece] = []  # not handed out yet
        self._counts = _Counts()
        self._clock = clock
        self._started: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None

    @property
    def started(self) -> bool:
        """It has had a slot."""
        return self._started is not None

    @property
    def missing(self) -> int:
        """Tokens to compute before it decodes: of its prompt, or of all that it had to give up.

        The pass over a prompt's last token brings the first token of the answer. A sequence that
        has generated tokens decodes once all but the last of them are computed.
        """
        return len(self.tokens) - self.num_computed - (self.generated > 0)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt_tokens)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_new_tokens - self.generated

    def start(self) -> None:
        """The request leaves the queue, for the first time or after it was preempted."""
        if self._started is None:
            self._started = self._clock()

    def next_token(self, logits: Floats) -> int:
        """Choose the token that goes on from logits [V], as the request wants it."""
        return next_token(logits, self.request.sampling, self.rng, len(self.tokens))

    def append(self, tokens: list[int], accepted: int, drafter: str | None, logits: Floats) -> int:
        """Take in one pass's tokens up to where the request ends.

        Args:
            tokens: accepted draft tokens, then the target's own token.
            accepted: how many of them are draft tokens.
            drafter: where the draft tokens came from.
            logits: [n, V] that each of the n tokens was chosen from.

        Returns:
            How many of the tokens are part of the output.
        """
        self._last_token = self._clock()
        if self._first_token is None:
            self._first_token = self._last_token
        most = self.request.logprobs
        for position, token in enumerate(tokens):
            origin = drafter if drafter is not None and position < accepted else TARGET
            self.tokens.append(token)
            told = None if most is None else logprob(logits[position], token, most)
            self._pieces += self._text.push(token, origin, told)
            if token in self._end_tokens or self._text.stopped:
                self.finish = FinishReason.STOP
            elif self.remaining == 0:
                self.finish = FinishReason.LENGTH
            if self.finish:
                return position + 1
        return len(tokens)

    def count_step(self, *, asked: bool, draft_tokens: int = 0, accepted: int = 0) -> None:
        """Count one pass in which the sequence decoded.

        Args:
            asked: a drafter was asked for draft tokens.
            draft_tokens: those that were verified.
            accepted: those that became part of the output.
        """
        counts = self._counts
        counts.sequence_steps += 1
        counts.draft_tokens += draft_tokens
        counts.drafts += draft_tokens > 0
        counts.draft_misses += asked and not draft_tokens
        missing = accepted - len(counts.accepted_per_position)
        counts.accepted_per_position += [0] * max(0, missing)
        for position in range(accepted):
            counts.accepted_per_position[position] += 1

    def output(self) -> Output | None:
        """What is new since the last call; None if nothing is."""
        if self.finish:
            self._pieces += self._text.flush()
        elif not self._pieces:
            return None
        pieces, self._pieces = tuple(self._pieces), []
        stats = self._stats() if self.finish else None
        urgent = self.request.stream or self.finish is not None
        return Output(self.request.request_id, pieces, self.finish, stats, urgent=urgent)

    def _stats(self) -> GenerationStats:
        now = self._clock()
        started = self._started if self._started is not None else now
        first = self._first_token if self._first_token is not None else now
        last = self._last_token if self._last_token is not None else now
        counts = self._counts
        return GenerationStats(
            prompt_tokens=len(self.request.prompt_tokens),
            cached_prompt_tokens=self.cached,
            generated_tokens=self.generated,
            sequence_steps=counts.sequence_steps,
            drafts=counts.drafts,
            draft_misses=counts.draft_misses,
            draft_tokens=counts.draft_tokens,
            accepted_tokens=sum(counts.accepted_per_position),
            accepted_per_position=tuple(counts.accepted_per_position),
            queue_seconds=started - self.request.arrival,
            prefill_seconds=first - started,
            decode_seconds=last - first,
            estimated_speedup=self.speculation.speedup,
            preemptions=self.preemptions,
            acceptance={
                name: tuple(seen.rates[: self.request.k_draft])
                for name, seen in self.speculation.named()
            },
        )
