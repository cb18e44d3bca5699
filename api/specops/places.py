"""Places in the slots and in the queue, and how long who gets one will wait.

A place costs nothing to look up or to give away, so a refusal is as fast in front of a long queue
as of a short one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specops.request import FinishReason, GenerationRequest, GenerationStats

_SMOOTHING = 0.1  # weight of the newest request in the measured means


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request stands when it is let in.

    `position` is 0 for a free slot, otherwise 1 for who gets the next one; `wait_seconds` is how
    long that is expected to take.
    """

    position: int
    wait_seconds: float


class Places:
    """Keeps count of who is in, and of what requests take. Used by one thread.

    Args:
        slots: requests that run at the same time.
        queue_size: requests that may wait.
        prompt_token_seconds: that a slot takes for a token of a prompt, until requests were seen.
        output_token_seconds: that a slot takes for a token of its output, likewise.
    """

    def __init__(
        self,
        *,
        slots: int,
        queue_size: int,
        prompt_token_seconds: float,
        output_token_seconds: float,
    ) -> None:
        self.slots = slots
        self.count = slots + queue_size
        self._inside: dict[str, tuple[int, float]] = {}  # tokens, expected seconds in a slot
        self._seconds = 0.0
        self._prompt_token_seconds = prompt_token_seconds
        self._output_token_seconds = output_token_seconds
        self._output_tokens = 50.0
        self.tokens = 0

    @property
    def taken(self) -> int:
        """Requests that run or wait; `tokens` is what all of them may take together."""
        return len(self._inside)

    @property
    def retry_after(self) -> int:
        """Seconds until half of those who wait are through: whoever comes then finds room."""
        return max(1, math.ceil(self._wait() / 2))

    def enter(self, requests: Sequence[GenerationRequest]) -> Place:
        """Give places to requests that follow each other.

        Returns:
            The place of the first.
        """
        place = Place(max(0, self.taken + 1 - self.slots), round(self._wait(), 3))
        for request in requests:
            seconds = self._expected(request)
            self._inside[request.request_id] = request.tokens, seconds
            self.tokens += request.tokens
            self._seconds += seconds
        return place

    def leave(self, request_id: str) -> None:
        """Free a place."""
        tokens, seconds = self._inside.pop(request_id)
        self.tokens -= tokens
        self._seconds = self._seconds - seconds if self._inside else 0.0  # no rounding is kept

    def learn(self, finish: FinishReason, stats: GenerationStats) -> None:
        """Take in what a request has cost; one that was broken off tells nothing."""
        if finish not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        computed = max(1, stats.prompt_tokens - stats.cached_prompt_tokens)
        prompt_token = stats.prefill_seconds / computed
        self._prompt_token_seconds = _mean(self._prompt_token_seconds, prompt_token)
        self._output_tokens = _mean(self._output_tokens, stats.generated_tokens)
        if stats.generated_tokens > 1:
            output_token = stats.decode_seconds / (stats.generated_tokens - 1)
            self._output_token_seconds = _mean(self._output_token_seconds, output_token)

    def _expected(self, request: GenerationRequest) -> float:
        output = min(request.max_new_tokens, self._output_tokens)
        prompt = len(request.prompt_tokens)
        return prompt * self._prompt_token_seconds + output * self._output_token_seconds

    def _wait(self) -> float:
        """Seconds until a slot is free for one who comes now; those who run are half through."""
        if self.taken < self.slots:
            return 0.0
        return self._seconds * (1 - 0.5 * self.slots / self.taken) / self.slots


def _mean(mean: float, newest: float) -> float:
    return mean + _SMOOTHING * (newest - mean)
