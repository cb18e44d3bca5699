"""How much of a prompt the next pass reads, so that nobody who is being answered waits long for it.

While a chunk of a prompt is read, the others get no token. The longest pause between two of theirs
is a chunk and a round of decoding, so the chunk gets what the round leaves of the allowed pause.
Both times are expected by the last ones, and the pause gets a margin by how far the last ones were
off. One margin for all: what makes a pass late has little to do with its size.
"""

from __future__ import annotations

from specops.costs import CostCurve
from specops.prompt_costs import PromptCosts

_MEAN = 1 / 8  # weight of the newest time in the mean
_SURPRISE = 2.0  # a time this many times longer than expected counts as this many
_SCATTER = 1 / 8  # and in the mean deviation of pauses
_MARGIN = 6.5  # mean deviations by which 1 pause in 100 is longer: few passes are late, but by much
_UNKNOWN = 1 / 24  # mean deviation of pauses that were not seen yet
_LONG = 0.5  # of the pause that is aimed at: shorter ones tell nothing of long ones
_LEAST_SHARE = 1 / 3  # of a round's time: where rounds are long, a prompt is still read
_LEAST_TOKENS = 8
_EVEN = 2  # chunks of odd width have a token computed in vain where kernels take them in pairs


class Expected:
    """A time that varies: the mean of the last ones, in seconds; a guess until they come."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._seen = 1  # the guess

    def saw(self, seconds: float) -> None:
        """Take in the newest."""
        self._seen += 1
        newest = min(seconds, _SURPRISE * self.seconds)
        self.seconds += max(_MEAN, 1 / self._seen) * (newest - self.seconds)


class Margin:
    """How much longer than expected a pause may become, as a share of what was expected.

    By mean deviations, as TCP sets its timeouts (Jacobson, Congestion Avoidance and Control,
    SIGCOMM 1988).
    """

    def __init__(self) -> None:
        self._deviation = _UNKNOWN

    def saw(self, expected: float, seconds: float) -> None:
        """Take in a pause."""
        error = min(abs(seconds / expected - 1), _SURPRISE - 1)
        self._deviation += _SCATTER * (error - self._deviation)

    @property
    def share(self) -> float:
        """Hardly any pause is later than this."""
        return _MARGIN * self._deviation


class Pace:
    """Chooses the width of prompts' passes. Used by the engine's thread.

    Args:
        costs: of this machine: the first expectations come from there.
        longest_pause: seconds between two tokens of a running request that prompts may cause.
        most: tokens of the widest chunk.
    """

    def __init__(self, costs: CostCurve, *, longest_pause: float, most: int) -> None:
        self._costs = costs
        self._longest_pause = longest_pause
        self._most = most
        self._margin = Margin()
        self._prompt = PromptCosts(costs)
        self._draft_token = Expected(costs.feed)
        self._round: dict[int, Expected] = {}  # by the number of rows that decode
        self._chunk: tuple[float, float] | None = None  # of this round: expected, and as it was

    def chunk(self, position: int, decoding: int) -> int:
        """Most tokens for a pass of the target.

        Args:
            position: tokens of the prompt that the cache holds.
            decoding: rows that wait meanwhile.
        """
        if not decoding:
            return self._most
        pause = self._pause(decoding)
        if self._prompt.seconds(position, self._most) <= pause:
            return self._most
        return self._fitting(self._prompt.tokens(position, pause))

    def draft_chunk(self, decoding: int) -> int:
        """Most tokens that a draft model may read while so many rows wait."""
        if not decoding:
            return self._most
        seconds = self._pause(decoding)
        if seconds >= self._most * self._draft_token.seconds:
            return self._most
        return self._fitting(int(seconds / self._draft_token.seconds))

    def _pause(self, decoding: int) -> float:
        """Seconds that so many rows may be kept waiting beside a round of their own."""
        waiting = self._round_of(decoding).seconds
        return max(self._aim - waiting, _LEAST_SHARE * waiting)

    @property
    def _aim(self) -> float:
        """Seconds that a pause is meant to last, so that hardly any lasts too long."""
        return self._longest_pause / (1 + self._margin.share)

    def _fitting(self, tokens: int) -> int:
        """The width of a pass that takes about so many tokens, fewer than the most."""
        return min(max(tokens // _EVEN * _EVEN, _LEAST_TOKENS), self._most)

    def read(self, position: int, tokens: int, seconds: float, *, watched: bool) -> None:
        """Take in the target's pass over `tokens` from `position` on; `watched`: others waited."""
        if watched:
            self._chunk = self._prompt.seconds(position, tokens), seconds
        self._prompt.saw(position, tokens, seconds)

    def draft_read(self, tokens: int, seconds: float) -> None:
        """Take in what the draft model took for its part."""
        if tokens:
            self._chunk = tokens * self._draft_token.seconds, seconds
            self._draft_token.saw(seconds / tokens)

    def decoded(self, rows: int, seconds: float) -> None:
        """Take in a round in which so many rows got their tokens."""
        expected = self._round_of(rows)
        if self._chunk is not None:
            chunk, took = self._chunk
            pause = chunk + expected.seconds
            if pause >= _LONG * self._aim:
                self._margin.saw(pause, took + seconds)
            self._chunk = None
        expected.saw(seconds)

    def _round_of(self, rows: int) -> Expected:
        if rows not in self._round:
            known = min(self._round, key=lambda other: abs(other - rows), default=None)
            if known is None:
                seconds = self._costs.decode[rows] * self._costs.drift
            else:
                seconds = self._round[known].seconds * rows / known
            self._round[rows] = Expected(seconds)
        return self._round[rows]
