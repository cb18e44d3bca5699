"""Turns a drafter's confidence in a token into the probability that the token is accepted.

A drafter may be too sure or not sure enough. So the tokens that really follow correct its
probabilities, whether its draft was verified or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specops.request import Draft

_EDGE = 1e-6  # minimum distance of a probability to 0 and 1 before its logit is taken
# An error moves the summand by this share of the error, over the root of the squared errors so far
# (Duchi et al. 2011, AdaGrad), and the factor by that times the confidence's logit. In the end some
# thousand tokens are remembered, and a promised probability varies by 0.012.
_RATE = 0.5
_FIRST_ERRORS, _MAX_ERRORS = 1.0, 10_000.0
_MIN_FACTOR = 0.1
_MAX_LOGIT = 700.0  # exp of more overflows; `min` also replaces NaN by it


@dataclass(slots=True)
class Guesses:
    """A draft that grows token by token.

    Attributes:
        length: length of the text before the draft.
        tokens: its tokens.
        promised: for each token, the probability that it is accepted if those before it are.
        seen: for each token, its line of the calibration and the logit of its confidence.
        reach: the probability that the whole draft is accepted.
    """

    length: int
    tokens: list[int] = field(default_factory=list)
    promised: list[float] = field(default_factory=list)
    seen: list[tuple[int, float]] = field(default_factory=list)
    reach: float = 1.0

    @property
    def draft(self) -> Draft:
        """Its tokens and their probabilities."""
        return Draft(tuple(self.tokens), accept_probs=tuple(self.promised))


class Calibration:
    """Turns confidence into the probability that a guess is accepted, and corrects it.

    Args:
        depth: number of guesses in a row with their own lines; further ones share the last.
        kinds: number of kinds of guesses; each is corrected separately.

    Attributes:
        latest: the latest draft of each slot.
    """

    def __init__(self, depth: int = 1, kinds: int = 1) -> None:
        self.latest: dict[int, Guesses] = {}
        self._depth, lines = depth, depth * kinds
        self._factors, self._summands = [1.0] * lines, [0.0] * lines
        self._errors = [_FIRST_ERRORS] * lines  # sums of their squares

    def begin(self, slot: int, text: Sequence[int]) -> Guesses:
        """Start a slot's draft after a text; the text shows how right the last draft was."""
        if (last := self.latest.get(slot)) is not None and last.tokens:
            self._learn(last, text[last.length : last.length + len(last.tokens)])
        guesses = self.latest[slot] = Guesses(len(text))
        return guesses

    def add(self, guesses: Guesses, token: int, confidence: float, kind: int = 0) -> float:
        """Add a token to a draft.

        Args:
            guesses: the draft.
            token: the token.
            confidence: the drafter's probability of the token.
            kind: kind of the guess, see `Calibration`.

        Returns:
            The probability that it is accepted if those before it are.
        """
        line = kind * self._depth + min(len(guesses.tokens), self._depth - 1)
        sure = min(max(confidence, _EDGE), 1 - _EDGE)
        logit = math.log(sure / (1 - sure))
        against = -self._factors[line] * logit - self._summands[line]
        probability = 1 / (1 + math.exp(min(_MAX_LOGIT, against)))
        guesses.tokens.append(token)
        guesses.promised.append(probability)
        guesses.seen.append((line, logit))
        guesses.reach *= probability
        return probability

    def _learn(self, guesses: Guesses, came: Sequence[int]) -> None:
        """Learn from the tokens that really came at a draft's positions, verified or not."""
        seen = zip(guesses.tokens, guesses.promised, guesses.seen, strict=True)
        for right, (token, probability, (line, logit)) in zip(came, seen, strict=False):
            error = (right == token) - probability
            self._errors[line] = min(_MAX_ERRORS, self._errors[line] + error * error)
            step = _RATE * error / math.sqrt(self._errors[line])
            self._summands[line] += step
            self._factors[line] = max(_MIN_FACTOR, self._factors[line] + step * logit)
            if right != token:
                return
