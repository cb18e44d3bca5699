"""How much of a prompt the next pass reads, so that nobody who is being answered waits long for it.

While a chunk of a prompt is read, the others get no token. The longest pause between two of theirs
is a chunk and a round of decoding, so the chunk gets what the round leaves of the allowed pause.
Both times are estimated from what the last ones took and how much they scattered, as TCP estimates
its round trips (Jacobson, Congestion Avoidance and Control, SIGCOMM 1988).
"""

from __future__ import annotations

from specops.costs import CostCurve

_MEAN = 1 / 8  # weight of the newest time in the mean
_SCATTER = 1 / 4  # and in the mean deviation
_MARGIN = 3.0  # mean deviations by which a time may be longer than expected: 1 in 100 is longer
_SURPRISE = 2.0  # a time this many times longer than the mean counts as this many
_LEAST_SHARE = 1 / 3  # of a round's time: where rounds are long, a prompt is still read
_LEAST_TOKENS = 8
_EVEN = 2  # chunks of odd width have a token computed in vain where kernels take them in pairs


class Estimate:
    """A time that varies: its mean and its mean deviation, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.mean = seconds
        self.deviation = seconds / 16

    def saw(self, seconds: float) -> None:
        """Take in the newest."""
        error = min(seconds, _SURPRISE * self.mean) - self.mean
        self.mean += _MEAN * error
        self.deviation += _SCATTER * (abs(error) - self.deviation)

    @property
    def longest(self) -> float:
        """What it hardly ever exceeds."""
        return self.mean + _MARGIN * self.deviation


class Pace:
    """Chooses the width of prompts' passes. Used by the engine's thread.

    Args:
        costs: of this machine: the first estimates come from there.
        longest_pause: seconds between two tokens of a running request that prompts may cause.
        most: tokens of the widest chunk.
    """

    def __init__(self, costs: CostCurve, *, longest_pause: float, most: int) -> None:
        self._costs = costs
        self._longest_pause = longest_pause
        self._most = most
        self._token: dict[int, Estimate] = {}  # by the power of 2 below the tokens read before
        self._draft_token = Estimate(costs.feed)
        self._round: dict[int, Estimate] = {}  # by the number of rows that decode

    def chunk(self, position: int, decoding: int) -> int:
        """Most tokens for a pass of the target.

        Args:
            position: tokens of the prompt that the cache holds.
            decoding: rows that wait meanwhile.
        """
        if not decoding:
            return self._most
        return self._fitting(self._pause(decoding) - self._fixed, self._token_at(position))

    def draft_chunk(self, decoding: int) -> int:
        """Most tokens that a draft model may read while so many rows wait."""
        if not decoding:
            return self._most
        return self._fitting(self._pause(decoding), self._draft_token)

    def _pause(self, decoding: int) -> float:
        """Seconds that so many rows may be kept waiting beside a round of their own."""
        waiting = self._round_of(decoding).longest
        return max(self._longest_pause - waiting, _LEAST_SHARE * waiting)

    def _fitting(self, seconds: float, token: Estimate) -> int:
        """Tokens, each of which takes so long, that fit into the time."""
        if seconds >= self._most * token.longest:
            return self._most
        tokens = int(seconds / token.longest) // _EVEN * _EVEN
        return min(max(tokens, _LEAST_TOKENS), self._most)

    def read(self, position: int, tokens: int, seconds: float) -> None:
        """Take in the target's pass over `tokens` from `position` on, for which others waited."""
        seconds = max(seconds - self._fixed, seconds / 2)
        self._token_at(position).saw(seconds / tokens)

    def draft_read(self, tokens: int, seconds: float) -> None:
        """Take in what the draft model took for its part."""
        if tokens:
            self._draft_token.saw(seconds / tokens)

    def decoded(self, rows: int, seconds: float) -> None:
        """Take in a round in which so many rows got their tokens."""
        self._round_of(rows).saw(seconds)

    @property
    def _fixed(self) -> float:
        """What a pass takes however narrow it is: reading the weights."""
        return self._costs.verify[1] * self._costs.drift

    def _token_at(self, position: int) -> Estimate:
        key = position.bit_length()
        if key not in self._token:
            known = min(self._token, key=lambda other: abs(other - key), default=None)
            if known is None:
                seconds = self._costs.prompt_token * self._costs.drift
            else:
                seconds = self._token[known].mean
            self._token[key] = Estimate(seconds)
        return self._token[key]

    def _round_of(self, rows: int) -> Estimate:
        if rows not in self._round:
            known = min(self._round, key=lambda other: abs(other - rows), default=None)
            if known is None:
                seconds = self._costs.decode[rows] * self._costs.drift
            else:
                seconds = self._round[known].mean * rows / known
            self._round[rows] = Estimate(seconds)
        return self._round[rows]
