"""What a pass over a piece of a prompt takes, by its tokens and by those before them.

A pass reads all weights, whatever its width; a token costs its products with them, and a little for
each token that it looks back at. Narrow pieces are therefore dearer by the token, and so are late
ones. Whoever holds that a token costs what the last ones did makes the next piece narrower, which
makes its tokens dearer, and so on.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from specops.costs import CostCurve, bounded

_REMEMBERED = 64  # passes
_RECENT = 8  # passes that tell how fast the machine is now
_BELIEF = 0.005  # in what is held before anything was seen; an observation's weight is 1
_DEARER = 1 / 1024  # for so many tokens before it a token may cost twice as much, to begin with
_LEAST_TOKEN = 0.01  # of the first guess: however noisy the passes were, a token costs something


class PromptCosts:
    """Fits the last passes, by least squares of relative errors.

    Seconds of a pass over `n` tokens after `p` others are taken to be
    `pace * (read + n * token + n * (p + n / 2) * pair)`. The three come from all passes that are
    remembered, `pace` from the latest: a machine slows down sooner than a pass changes its shape.

    Args:
        costs: of this machine: until passes were seen, they are expected to cost what those cost
            that verify.
    """

    def __init__(self, costs: CostCurve) -> None:
        widest = len(costs.verify) - 1
        read = costs.verify[1] * costs.drift
        token = costs.prompt_token * costs.drift - read / widest
        token = max(token, _LEAST_TOKEN * costs.prompt_token * costs.drift)
        self._first = np.array([read, token, 0.0])
        self._least = np.array([0.0, _LEAST_TOKEN * token, 0.0])
        self._scale = np.array([read, token, token * _DEARER])
        self._fit = self._first
        self._pace = 1.0
        self._seen: deque[tuple[float, float, float, float]] = deque(maxlen=_REMEMBERED)

    def seconds(self, position: int, tokens: int) -> float:
        """What a pass over so many tokens from `position` on is expected to take."""
        read, token, pair = self._fit
        pairs = tokens * (position + tokens / 2)
        return float(self._pace * (read + tokens * token + pairs * pair))

    def tokens(self, position: int, seconds: float) -> int:
        """Most tokens from `position` on whose pass is expected to take no longer; maybe 0."""
        read, token, pair = self._fit
        left = seconds / self._pace - read
        if left <= 0:
            return 0
        first = token + position * pair  # seconds of the first token
        # The positive root of pair / 2 * n ** 2 + first * n = left, also where pair is 0.
        return int(2 * left / (first + (first * first + 2 * pair * left) ** 0.5))

    def saw(self, position: int, tokens: int, seconds: float) -> None:
        """Take in a pass over `tokens` from `position` on."""
        expected = self.seconds(position, tokens)
        seconds = expected * bounded(seconds / expected)
        self._seen.append((1.0, tokens, tokens * (position + tokens / 2), seconds))
        seen = np.array(self._seen)
        passes, took = seen[:, :3], seen[:, 3]
        # In units of the first guess, so that belief in it weighs alike on all three.
        shares = passes * self._scale / took[:, None]
        units = np.linalg.solve(
            shares.T @ shares + _BELIEF * np.eye(3),
            shares.sum(axis=0) + _BELIEF * self._first / self._scale,
        )
        self._fit = np.maximum(units * self._scale, self._least)
        recent = slice(-_RECENT, None)
        late = float((took[recent] / (passes[recent] @ self._fit)).sum())
        count = min(len(seen), _RECENT)
        self._pace = (1.0 + late) / (1 + count)
