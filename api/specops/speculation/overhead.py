"""Learns the time of a step outside its passes: planning, choosing tokens, text, output.

A pass of a small model takes a tenth of a millisecond, and each token that comes of it a third of
that again: it is decoded, searched for stop strings and handed to its client. A draft token has a
row of logits, whose largest has to be found. `CostModel` predicts passes; this is the rest.
"""

from __future__ import annotations

import numpy as np

from specops.runtime.cost_model import OUTLIER

_STEPS = 64  # between two fits
_MEMORY = 0.9  # weight of earlier observations, after each
_RIDGE = 1e-6  # of the largest sum of squares: what cannot be told apart shares the seconds
# What few draft tokens have taken is hardly believed: where they waited for a core, that would end
# the drafting, and with it all that could correct it.
_DOUBT = 16.0


class Overhead:
    """Predicts the seconds of a step outside passes, by a running fit. For the engine's thread.

    Attributes:
        step: seconds of each step.
        drafting: seconds of each step that verifies draft tokens, beyond those of the tokens.
        request: seconds for each request that decodes in it.
        draft_token: seconds for each draft token that it verifies.
        token: seconds for each token that comes of it.
    """

    def __init__(self) -> None:
        self.step = self.drafting = self.request = self.draft_token = self.token = 0.0
        # Since the last fit, by requests, draft tokens and tokens: number of steps, their seconds.
        self._seen: dict[tuple[int, int, int], tuple[int, float]] = {}
        self._steps = 0
        self._sums = np.zeros((6, 6))  # of products of what was seen

    def seconds(self, requests: int, draft_tokens: int = 0, tokens: float | None = None) -> float:
        """Seconds outside passes; without `tokens` each request gets one."""
        tokens = requests if tokens is None else tokens
        own = self.step + self.request * requests + self.token * tokens
        return own + self.draft_token * draft_tokens + self.drafting * bool(draft_tokens)

    def observe(self, requests: int, draft_tokens: int, tokens: int, seconds: float) -> None:
        """Learn from a step. One that waited for a core counts as twice the expected time."""
        if expected := self.seconds(requests, draft_tokens, tokens):
            seconds = min(seconds, OUTLIER * expected)
        key = requests, draft_tokens, tokens
        count, known = self._seen.get(key, (0, 0.0))
        self._seen[key] = count + 1, known + seconds
        self._steps += 1
        if not self._steps % _STEPS:
            self._fit()

    def _fit(self) -> None:
        """Least squares, without terms that would be below 0."""
        rows = np.array(
            [(1, key[1] > 0, *key, total / count) for key, (count, total) in self._seen.items()]
        )
        counts = np.array([count for count, _ in self._seen.values()])
        self._seen = {}
        self._sums = _MEMORY * self._sums + (rows.T * counts) @ rows
        squares, products = self._sums[:5, :5], self._sums[:5, 5]
        squares = squares + _RIDGE * squares.max() * np.eye(5)
        found, kept = np.zeros(5), list(range(5))
        while kept:
            part = np.linalg.solve(squares[np.ix_(kept, kept)], products[kept])
            if part.min() >= 0:
                found[kept] = part
                break
            del kept[int(part.argmin())]
        self.step, self.drafting, self.request, self.draft_token, self.token = found.tolist()
        drafted, tokens = self._sums[1, 1].item(), self._sums[3, 3].item()
        self.drafting *= drafted / (drafted + _DOUBT)
        # A row of logits takes no longer than all that a request takes without drafts.
        self.draft_token = min(self.draft_token * tokens / (tokens + _DOUBT), self.seconds(1))
