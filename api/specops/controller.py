"""How many guesses pay: chosen per request and step from what passes cost and guesses have earned.

One round decodes every request once. A request may join the pass that all plain ones share, or
have a pass of its own that verifies guesses. With `rate` tokens per second to be had otherwise, a
pass that brings `tokens` and takes `seconds` is worth `tokens - rate * seconds`; the round that is
worth most is taken. No guesses is always one of the choices.

What does not pay is tried again now and then, within a fixed share of the time: a text may turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specops.acceptance import Acceptance, Outlook
from specops.asking import Asking
from specops.costs import CostCurve

_PROBING = 0.005  # share of the time that may go into verifying guesses that do not pay
_STICKINESS = 0.02  # tokens by which another length must be better than the last one
_RATE_WEIGHT = 1 / 48  # of a round in the mean rate
_WORTHWHILE = 0.25  # share of steps from which on a model is worth feeding beforehand
_FRESH = 2  # tokens that a draft model takes in with its first guess where it has kept up
_LONGEST_MATCH = 16  # longer ones are all alike


def kind_of_match(length: int) -> int:
    """Sorts drafts by how long a match they continue: 0 for none, else the power of 2 below it."""
    return 1 << min(length, _LONGEST_MATCH).bit_length() - 1 if length else 0


@dataclass(slots=True)
class Candidate:
    """A request in a round.

    Attributes:
        outlook: what it has seen.
        drafter: who guesses; None where nobody does, and nothing is to be decided.
        source: who made the draft at hand, where that is not the drafter itself.
        kind: of the draft at hand, see `kind_of_match`; those of one kind are taken to do alike.
        most: guesses at hand, or that may be asked for.
        paid: the guesses cost forward passes of the draft model, still to come.
        backlog: tokens that the draft model has to take in before it guesses.
        fixed: all guesses are verified, whether that pays or not.
        align: widths that a pass of its own is rounded up to; see `exactness`.
        alone: cannot share a pass.
    """

    outlook: Outlook
    drafter: str | None = None
    source: str | None = None
    kind: int = 0
    most: int = 0
    paid: bool = False
    backlog: int = 0
    fixed: bool = False
    align: int = 1
    alone: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Whose drafts of which kind are expected to do like this one."""
        return self.source or self.drafter or "", self.kind

    def width(self, guesses: int) -> int:
        """Tokens of the pass that verifies so many guesses."""
        return guesses + 1 + -(guesses + 1) % self.align


class Controller:
    """Chooses draft lengths. Used by the engine's thread.

    Args:
        costs: of this machine; kept up to date from what it is told.
        positions: longest draft.
    """

    def __init__(self, costs: CostCurve, positions: int) -> None:
        self.costs = costs
        self._asking = Asking()
        self._positions = positions
        self._common: dict[tuple[str, int], Acceptance] = {}  # over all requests
        self._paying: dict[str, float] = {}  # share of steps in which a drafter's model was asked
        # By the number of requests in a round: its mean tokens, and the mean time they took.
        self._tokens = [0.0] * len(costs.decode)
        self._seconds = [0.0] * len(costs.decode)
        self._plain_step = costs.decode[1]  # of a request in this round, were all of them plain
        self._spared = self._plain_step  # that the shared pass takes less for each who verifies
        self._asking.begin(1, self._plain_step)
        self._round_tokens, self._round_seconds = 0, 0.0
        self._adaptive_seconds = 0.0  # of them, those of requests whose guesses are chosen here
        self._probe_credit = 0.0  # time that may go into guesses that do not pay
        self._active = 0  # requests in the latest round

    def begin(self, active: int) -> None:
        """A round of so many requests is about to be planned."""
        self._active = active
        self._plain_step = self.costs.decode[active] / active
        self._asking.begin(active, self._plain_step)

    def asks(self, outlook: Outlook, drafter: str) -> bool:
        """Whether guesses are asked for in this step: they have paid, or it is time to try."""
        return self._asking.pays(outlook, drafter)

    def choose(self, candidates: Sequence[Candidate]) -> list[int]:
        """Guesses to verify per request, 0 for none: the round that is worth most.

        Args:
            candidates: all that decode, by row; as many as the round began with.
        """
        active = len(candidates)
        rate = self._rate(active)
        lengths = [0] * active
        undecided: list[tuple[float, int, int]] = []  # worth of guessing, index, length
        sharing = [False] * active
        for index, candidate in enumerate(candidates):
            if candidate.fixed:
                lengths[index] = candidate.most
                sharing[index] = not candidate.most and not candidate.alone
                continue
            length, worth = self._best_length(candidate, rate)
            if not candidate.alone:
                sharing[index] = True
                if length:
                    undecided.append((worth, index, length))
            elif length and worth > 1 - rate * self.costs.verify[candidate.width(0)]:
                lengths[index] = length
        if undecided:
            self._split(undecided, sharing, rate, lengths)
        for index, candidate in enumerate(candidates):
            if candidate.most and not candidate.fixed:
                self._pay(candidate, worthwhile=lengths[index] > 0)
                if not lengths[index] and self._probes(candidate):
                    lengths[index] = 1
        self._spared = self._sparing(candidates, lengths)
        return lengths

    def pays(self, drafter: str) -> bool:
        """Whether a drafter's model has been worth asking of late, over all requests."""
        return self._paying.get(drafter, 1.0) > _WORTHWHILE

    def speedup(self, active: int) -> float:
        """Estimated tokens per second in rounds of so many requests, over plain decoding's."""
        if not 0 < active < len(self._seconds):
            return 1.0
        return max(1.0, self._rate(active) * self.costs.decode[active] / active)

    @property
    def estimated_speedup(self) -> float:
        """`speedup` of rounds like the latest; 1 before the first. For any thread."""
        return self.speedup(self._active)

    def _rate(self, active: int) -> float:
        """Tokens per second that rounds of so many requests bring, plain ones at least."""
        plain, seconds = active / self.costs.decode[active], self._seconds[active]
        return max(plain, self._tokens[active] / seconds) if seconds else plain

    def _best_length(self, candidate: Candidate, rate: float) -> tuple[int, float]:
        """The number of guesses, at least 1, that is worth most, and its worth; 0 without any."""
        if not candidate.most or candidate.drafter is None:
            return 0, 0.0
        verify, align = self.costs.verify, candidate.align
        guess, catching_up = self._guessing(candidate)
        rates = self._acceptance(candidate).rates
        expected, reached = 1.0 - rate * catching_up, 1.0
        best, worth, last = 0, float("-inf"), candidate.outlook.length
        for length in range(1, candidate.most + 1):
            reached *= rates[length - 1]
            expected += reached
            width = length + 1  # as `Candidate.width`, which would cost a call each
            here = expected - rate * (verify[width + -width % align] + guess * length)
            if length == last:
                here += _STICKINESS
            if here > worth:
                best, worth = length, here
        return best, worth

    def _split(
        self,
        undecided: list[tuple[float, int, int]],
        sharing: list[bool],
        rate: float,
        lengths: list[int],
    ) -> None:
        """Give passes of their own to those who are worth more there than in the shared one.

        The shared pass takes all rows from the first to the last of those who are in it.
        """
        undecided.sort(reverse=True)
        decode = self.costs.decode
        first, end, rest = 0, len(sharing), sum(sharing)
        total, best, chosen = 0.0, float("-inf"), 0
        for count in range(len(undecided) + 1):
            if count:
                worth, index, _ = undecided[count - 1]
                total, rest, sharing[index] = total + worth, rest - 1, False
            while first < end and not sharing[first]:
                first += 1
            while first < end and not sharing[end - 1]:
                end -= 1
            if (here := total + rest - rate * decode[end - first]) > best:
                best, chosen = here, count
        for _, index, length in undecided[:chosen]:
            lengths[index] = length

    def _sparing(self, candidates: Sequence[Candidate], lengths: Sequence[int]) -> float:
        """Seconds of the shared pass that each who leaves it saves: a step's where all do."""
        if not any(lengths):
            return self._plain_step
        rows = [row for row, candidate in enumerate(candidates) if not candidate.alone]
        staying = [row for row in rows if not lengths[row]]
        leaving = len(rows) - len(staying)
        if not leaving:
            return self._plain_step
        decode = self.costs.decode
        left = decode[staying[-1] - staying[0] + 1] if staying else 0.0
        return max(0.0, decode[len(rows)] - left) / leaving

    def _probes(self, candidate: Candidate) -> bool:
        """Whether one guess is verified although it does not seem to pay."""
        cost = self.costs.verify[candidate.width(1)] + sum(self._guessing(candidate))
        cost -= self._plain_step
        if self._probe_credit < cost:
            return False
        self._probe_credit = 0.0
        return True

    def _guessing(self, candidate: Candidate) -> tuple[float, float]:
        """What a guess costs, and what comes before the first."""
        if not candidate.paid:
            return 0.0, 0.0
        return self.costs.guess, self.costs.feed * candidate.backlog

    # -- what it is told -----------------------------------------------------------------------

    def asked(self, outlook: Outlook, drafter: str, seconds: float) -> None:
        """Take in what it took to ask and to choose, guesses of a draft model apart."""
        self._asking.asked(outlook, drafter, seconds / self.costs.drift)

    def decoded(self, candidates: Sequence[Candidate], seconds: float, *, rows: int) -> None:
        """Take in the pass of one token for each of these.

        Args:
            candidates: who shared it.
            seconds: all that it took, drawing the tokens included.
            rows: that it took, those of others between them included.
        """
        self.costs.saw_decode(rows, seconds)
        share = self.costs.decode[rows] / len(candidates)
        for candidate in candidates:
            candidate.outlook.length = 0
            self._count(candidate, 1, share)

    def verified(
        self,
        candidate: Candidate,
        guesses: int,
        accepted: int,
        seconds: float,
        guess_seconds: float,
    ) -> None:
        """Take in a pass of a request's own.

        Args:
            candidate: whose it was.
            guesses: how many were verified.
            accepted: how many of them stand.
            seconds: all that it took, guessing apart.
            guess_seconds: what the draft model took for these guesses.
        """
        width = candidate.width(guesses)
        self.costs.saw_verify(width, seconds)
        cost = self.costs.verify[width]
        outlook, drafter = candidate.outlook, candidate.drafter
        outlook.length = guesses
        if guesses and drafter is not None:
            if candidate.paid:
                guess, catching_up = self._guessing(candidate)
                cost += guess * guesses + catching_up
                if candidate.backlog <= _FRESH:
                    self.costs.saw_guess(guesses, guess_seconds)
            self._acceptance(candidate).observe(guesses, accepted)
            self._common[candidate.key].observe(guesses, accepted)
            spared = self._plain_step if candidate.alone else self._spared
            self._asking.gained(outlook, drafter, accepted - (cost - spared) / self._plain_step)
        self._count(candidate, accepted + 1, cost)

    def round_ended(self) -> None:
        """Take in that all of the requests in a round had their pass."""
        active = self._active
        tokens, seconds = self._round_tokens, self._round_seconds
        self._asking.earned(self._adaptive_seconds)
        self._probe_credit += _PROBING * self._adaptive_seconds
        self._round_tokens, self._round_seconds, self._adaptive_seconds = 0, 0.0, 0.0
        if not self._seconds[active]:
            self._tokens[active], self._seconds[active] = float(tokens), seconds
            return
        self._tokens[active] += _RATE_WEIGHT * (tokens - self._tokens[active])
        self._seconds[active] += _RATE_WEIGHT * (seconds - self._seconds[active])

    # -- what it keeps -------------------------------------------------------------------------

    def _count(self, candidate: Candidate, tokens: int, cost: float) -> None:
        """Take in one step of a request."""
        self._round_tokens += tokens
        self._round_seconds += cost
        outlook = candidate.outlook
        outlook.seconds += cost
        outlook.plain_seconds += tokens * self._plain_step
        if candidate.drafter is not None and not candidate.fixed:
            self._adaptive_seconds += cost

    def _pay(self, candidate: Candidate, *, worthwhile: bool) -> None:
        if candidate.paid and candidate.drafter is not None:
            before = self._paying.get(candidate.drafter, 1.0)
            self._paying[candidate.drafter] = before + _RATE_WEIGHT * (worthwhile - before)

    def _acceptance(self, candidate: Candidate) -> Acceptance:
        key, seen = candidate.key, candidate.outlook.seen
        if (found := seen.get(key)) is None:
            if (common := self._common.get(key)) is None:
                common = self._common[key] = Acceptance(self._positions)
            found = seen[key] = common.heir()
        return found
