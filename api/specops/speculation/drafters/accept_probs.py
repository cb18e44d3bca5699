"""Turns how sure a drafter is of a token into the probability that it is accepted.

If a drafter was calibrated at all, it was on other texts than those that it reads here, so the
tokens that follow correct its probabilities, whether its draft was verified or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specops.request import Draft

_EDGE = 1e-6  # least distance to 0 and 1 of a probability whose logit is taken
# An error corrects the logit of a promise by this share of it, over the root of the squared errors
# so far (Duchi et al. 2011, AdaGrad), and by that times the confidence's logit its factor. In the
# end some thousand tokens are remembered, and a promise varies by 0.012.
_RATE = 0.5
_FIRST_ERRORS, _MAX_ERRORS = 1.0, 10_000.0
_MIN_FACTOR = 0.1
_MAX_LOGIT = 700.0  # exp of more overflows; `min` takes it in the place of NaN, too


class Calibration:
    """Turns confidence into the probability that a guess is accepted, and corrects it.

    Args:
        fitted: factor and summand for the logit of each guess in a row, see `EagleFolder`. The last
            one counts for all further guesses; without any, the confidence is taken as it is.
        depth: number of guesses in a row; further ones count as the last.
        kinds: number of kinds of guesses that are corrected each by itself.
    """

    def __init__(self, fitted: Sequence[tuple[float, float]], depth: int, kinds: int = 1) -> None:
        fitted = fitted or ((1.0, 0.0),)
        self.depth = depth
        lines = [fitted[min(guess, len(fitted) - 1)] for guess in range(depth)] * kinds
        self._factors = [max(_MIN_FACTOR, factor) for factor, _ in lines]
        self._summands = [summand for _, summand in lines]
        self._errors = [_FIRST_ERRORS] * len(lines)  # sums of their squares

    def accept_prob(self, guess: int, confidence: float, kind: int = 0) -> float:
        """The probability of a guess, by its place and its kind, that the drafter is so sure of."""
        line = self._line(guess, kind)
        against = -self._factors[line] * _logit(confidence) - self._summands[line]
        return 1 / (1 + math.exp(min(_MAX_LOGIT, against)))

    def learn(
        self,
        tokens: Sequence[int],
        promised: Sequence[float],
        came: Sequence[int],
        kinds: Sequence[int] = (),
    ) -> None:
        """Learn from the tokens that came in the place of a draft, whether verified or not.

        Args:
            tokens: [k], the draft.
            promised: [k], what `accept_prob` has said of each.
            came: the tokens that came from its first place on.
            kinds: [k], of the guesses; without them all are of the first.
        """
        for guess, (token, probability) in enumerate(zip(tokens, promised, strict=True)):
            if guess == len(came):
                return
            line = self._line(guess, kinds[guess] if kinds else 0)
            right = came[guess] == token
            error, factor = right - probability, self._factors[line]
            own = (_logit(probability) - self._summands[line]) / factor
            self._errors[line] = min(_MAX_ERRORS, self._errors[line] + error * error)
            step = _RATE * error / math.sqrt(self._errors[line])
            self._summands[line] += step
            self._factors[line] = max(_MIN_FACTOR, factor + step * own)
            if not right:
                return

    def _line(self, guess: int, kind: int) -> int:
        return kind * self.depth + min(guess, self.depth - 1)


@dataclass(slots=True)
class _Latest:
    """A slot's latest draft. `reach` is the probability that all of it is accepted."""

    length: int  # of the text that it follows
    tokens: list[int] = field(default_factory=list)
    promised: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    reach: float = 1.0


class Guesses:
    """The latest draft of each slot, token by token, each with its calibrated probability.

    Args:
        fitted, depth, kinds: see `Calibration`. With the depth 1 all tokens are alike.
    """

    def __init__(
        self, fitted: Sequence[tuple[float, float]] = (), depth: int = 1, kinds: int = 1
    ) -> None:
        self._calibration = Calibration(fitted, depth, kinds)
        self._latest: dict[int, _Latest] = {}

    def begin(self, slot: int, text: Sequence[int]) -> None:
        """Begin a draft that follows a text, which shows how right the slot's last one was."""
        if (last := self._latest.get(slot)) is not None and last.tokens:
            came = text[last.length : last.length + len(last.tokens)]
            self._calibration.learn(last.tokens, last.promised, came, last.kinds)
        self._latest[slot] = _Latest(len(text))

    def add(self, slot: int, token: int, confidence: float, kind: int = 0) -> float:
        """Add a token to the slot's draft; returns the probability that it is accepted."""
        latest = self._latest[slot]
        probability = self._calibration.accept_prob(len(latest.tokens), confidence, kind)
        latest.tokens.append(token)
        latest.promised.append(probability)
        latest.kinds.append(kind)
        latest.reach *= probability
        return probability

    def tokens(self, slot: int) -> list[int]:
        """The tokens of the slot's draft so far; the caller must not change them."""
        return self._latest[slot].tokens

    def reach(self, slot: int) -> float:
        """The probability that all of the slot's draft is accepted."""
        return self._latest[slot].reach

    def draft(self, slot: int) -> Draft:
        """The slot's draft."""
        latest = self._latest[slot]
        return Draft(tuple(latest.tokens), accept_probs=tuple(latest.promised))

    def release(self, slot: int) -> None:
        """Forget a slot's draft."""
        self._latest.pop(slot, None)


def _logit(probability: float) -> float:
    probability = min(max(probability, _EDGE), 1 - _EDGE)
    return math.log(probability / (1 - probability))
