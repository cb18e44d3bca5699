"""Turns a draft head's confidence into the probability that its guess is accepted.

If a head was calibrated at all, it was on other texts than those that it reads here, so the tokens
that follow correct its probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specops.request import Draft

_EDGE = 1e-6  # least distance to 0 and 1 of a probability whose logit is taken
# An error corrects the logit of a promise by this share of it, over the root of the squared errors
# so far (Duchi et al. 2011, AdaGrad), and by that times the confidence's logit its factor. In the
# end some thousand tokens are remembered, and a promise varies by 0.012.
_RATE = 0.25
_FIRST_ERRORS, _MOST_ERRORS = 4.0, 2500.0
_LEAST_FACTOR = 0.1
_MOST_LOGIT = 700.0  # exp of more overflows; `min` takes it in the place of NaN, too


class Calibration:
    """Turns a head's confidence into the probability that a guess is accepted, and corrects it.

    Args:
        fitted: factor and summand for the logit of each guess in a row, see `EagleFolder`. The last
            one counts for all further guesses; without any, the confidence is taken as it is.
        depth: number of guesses in a row.
        kinds: number of kinds of guesses that are corrected each by itself.
    """

    def __init__(self, fitted: Sequence[tuple[float, float]], depth: int, kinds: int = 1) -> None:
        fitted = fitted or ((1.0, 0.0),)
        self.depth = depth
        lines = [fitted[min(guess, len(fitted) - 1)] for guess in range(depth)] * kinds
        self._factors = [max(_LEAST_FACTOR, factor) for factor, _ in lines]
        self._summands = [summand for _, summand in lines]
        self._errors = [_FIRST_ERRORS] * len(lines)  # sums of their squares

    def promise(self, guess: int, sure: float, kind: int = 0) -> float:
        """The probability of a guess, by its place and its kind, that the head is so sure of."""
        line = kind * self.depth + guess
        against = -self._factors[line] * _logit(sure) - self._summands[line]
        return 1 / (1 + math.exp(min(_MOST_LOGIT, against)))

    def learn(self, draft: Draft, came: Sequence[int], kinds: Sequence[int] = ()) -> None:
        """Learn from the tokens that came in the place of a draft, whether verified or not.

        `kinds` are those of the guesses; without them all are of the first.
        """
        for guess, (token, probability) in enumerate(
            zip(draft.tokens, draft.accept_probs, strict=True)
        ):
            if guess == len(came):
                return
            line = (kinds[guess] if kinds else 0) * self.depth + guess
            right = came[guess] == token
            error, factor = right - probability, self._factors[line]
            own = (_logit(probability) - self._summands[line]) / factor
            self._errors[line] = min(_MOST_ERRORS, self._errors[line] + error * error)
            step = _RATE * error / math.sqrt(self._errors[line])
            self._summands[line] += step
            self._factors[line] = max(_LEAST_FACTOR, factor + step * own)
            if not right:
                return


def _logit(probability: float) -> float:
    probability = min(max(probability, _EDGE), 1 - _EDGE)
    return math.log(probability / (1 - probability))
