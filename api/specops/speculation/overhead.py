"""Learns what a step takes beside its passes: planning, choosing tokens, text, output.

A pass of a small model takes a tenth of a millisecond, and each token that comes of it a third of
that again: it is decoded, searched for stop strings and handed to its client. A draft token has a
row of logits, whose largest has to be found. `CostModel` predicts passes; this is the rest.
"""

from __future__ import annotations

from specops.runtime.cost_model import OUTLIER

_RATE = 1 / 32  # share of a step's error that the estimate takes over


class Overhead:
    """Predicts the seconds of a step outside passes. Used by the engine's thread.

    Attributes:
        step: seconds of each step.
        request: seconds for each request that decodes in it.
        draft_token: seconds for each draft token that it verifies.
        token: seconds for each token that comes of it.
    """

    __slots__ = ("draft_token", "request", "step", "token")

    def __init__(self) -> None:
        self.step = self.request = self.draft_token = self.token = 0.0

    def seconds(self, requests: int, draft_tokens: int = 0, tokens: float | None = None) -> float:
        """Seconds outside passes; without `tokens` each request gets one."""
        tokens = requests if tokens is None else tokens
        own = self.step + self.request * requests
        return own + self.draft_token * draft_tokens + self.token * tokens

    def observe(self, requests: int, draft_tokens: int, tokens: int, seconds: float) -> None:
        """Learn from a step. Normalized least mean squares, as in `CostModel.observe`."""
        expected = self.seconds(requests, draft_tokens, tokens)
        if expected:
            seconds = min(seconds, OUTLIER * expected)  # the thread waited for a core
        norm = 1 + requests * requests + draft_tokens * draft_tokens + tokens * tokens
        move = (_RATE if expected else 1.0) * (seconds - expected) / norm
        self.step = max(0.0, self.step + move)
        self.request = max(0.0, self.request + move * requests)
        self.draft_token = max(0.0, self.draft_token + move * draft_tokens)
        self.token = max(0.0, self.token + move * tokens)
