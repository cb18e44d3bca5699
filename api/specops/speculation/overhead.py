"""Learns the time of a step outside its passes: planning, choosing tokens, text, output.

A pass of a small model takes a tenth of a millisecond. Each new token takes a third of that again:
it is decoded, searched for stop strings and sent to its client. Each draft token has a row of
logits that needs an argmax. `CostModel` predicts the passes, this module the rest.
"""

from __future__ import annotations

import numpy as np

from specops.runtime.cost_model import OUTLIER

_STEPS = 64  # between two fits
_MEMORY = 0.9  # weight of earlier observations, after each fit
_RIDGE = 1e-6  # of the largest sum of squares: terms that cannot be told apart share the seconds
# Times of few draft tokens count little: if those waited for a core, drafting would stop, and
# nothing would correct the error.
_DOUBT = 16.0


class Overhead:
    """Predicts the seconds of a step outside passes, by a running fit. For the engine's thread.

    Attributes:
        step: seconds per step.
        drafting: additional seconds per step that verifies any draft tokens.
        request: seconds per decoding request.
        draft_token: seconds per verified draft token.
        token: seconds per new token.
    """

    def __init__(self) -> None:
        self.step = self.drafting = self.request = self.draft_token = self.token = 0.0
        # Since the last fit, by requests, draft tokens and tokens: number of steps, total seconds.
        self._seen: dict[tuple[int, int, int], tuple[int, float]] = {}
        self._steps = 0
        self._sums = np.zeros((6, 6))  # of products of the observations, with the seconds last

    def seconds(self, requests: float, draft_tokens: int = 0, tokens: float | None = None) -> float:
        """Seconds of a step outside passes.

        Args:
            requests: number of decoding requests.
            draft_tokens: number of verified draft tokens.
            tokens: number of new tokens; None: one per request.
        """
        tokens = requests if tokens is None else tokens
        own = self.step + self.request * requests + self.token * tokens
        return own + self.draft_token * draft_tokens + self.drafting * bool(draft_tokens)

    def observe(self, requests: int, draft_tokens: int, tokens: int, seconds: float) -> None:
        """Learn from a step. Its time is capped at `OUTLIER` times the expected time.

        Args:
            requests: number of decoding requests.
            draft_tokens: number of verified draft tokens.
            tokens: number of new tokens.
            seconds: time outside passes. A step that waited for a core took much longer.
        """
        if expected := self.seconds(requests, draft_tokens, tokens):
            seconds = min(seconds, OUTLIER * expected)
        key = requests, draft_tokens, tokens
        count, known = self._seen.get(key, (0, 0.0))
        self._seen[key] = count + 1, known + seconds
        self._steps += 1
        if not self._steps % _STEPS:
            self._fit()

    def _fit(self) -> None:
        """Fit by least squares, dropping terms that would fall below 0."""
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
        # The usual step without drafts is known best. Draft tokens do not double its time, and each
        # takes no longer than a request. Otherwise a few that waited for a core in the first steps,
        # where nothing is expected yet, could end all drafting.
        requests = (self._sums[0, 2] / self._sums[0, 0]).item()
        plain = self.seconds(requests)
        self.drafting = min(self.drafting * drafted / (drafted + _DOUBT), plain)
        self.draft_token = min(self.draft_token * tokens / (tokens + _DOUBT), plain / requests)
