"""The requests that run or wait: how many there are, what they may take, how long a new one waits.

Nothing here grows with the queue, so a refusal is as fast in front of a long queue as of a short
one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specops.request import FinishReason, GenerationRequest, GenerationStats

_SMOOTHING = 0.1  # weight of the newest request in the measured means


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where a request stands when it is let in.

    `position` is 0 where a slot is free and 1 for the request that gets the next one;
    `wait_seconds` is how long that is expected to take.
    """

    position: int
    wait_seconds: float


class QueueTracker:
    """Counts the requests in flight and what they take. Used by one thread.

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
        self.capacity = slots + queue_size
        self._in_flight: dict[str, tuple[int, float]] = {}  # tokens, expected seconds in a slot
        self._seconds = 0.0
        self._prompt_token_seconds = prompt_token_seconds
        self._output_token_seconds = output_token_seconds
        self._output_tokens = 50.0
        self.tokens = 0

    @property
    def in_flight(self) -> int:
        """Requests that run or wait; `tokens` is what all of them may take together."""
        return len(self._in_flight)

    @property
    def retry_after(self) -> int:
        """Seconds until half of the waiting requests are through: then there is room."""
        return max(1, math.ceil(self._wait() / 2))

    def enter(self, requests: Sequence[GenerationRequest]) -> QueuePosition:
        """Take in requests that follow each other.

        Returns:
            The queue position of the first.
        """
        position = QueuePosition(max(0, self.in_flight + 1 - self.slots), round(self._wait(), 3))
        for request in requests:
            seconds = self._expected(request)
            self._in_flight[request.request_id] = request.tokens, seconds
            self.tokens += request.tokens
            self._seconds += seconds
        return position

    def leave(self, request_id: str) -> None:
        """Take a request out."""
        tokens, seconds = self._in_flight.pop(request_id)
        self.tokens -= tokens
        self._seconds = self._seconds - seconds if self._in_flight else 0.0  # no rounding is kept

    def learn(self, finish: FinishReason, stats: GenerationStats) -> None:
        """Take in what a request has cost; a cancelled one tells nothing."""
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
        """Seconds until a new request gets a slot; the running ones count as half through."""
        if self.in_flight < self.slots:
            return 0.0
        return self._seconds * (1 - 0.5 * self.slots / self.in_flight) / self.slots


def _mean(mean: float, newest: float) -> float:
    return mean + _SMOOTHING * (newest - mean)
