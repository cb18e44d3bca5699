"""How often draft tokens are accepted: the estimate for drafters that do not give one themselves.

A lookup and a draft head estimate a probability for each token and correct it by the tokens that
follow. A draft model estimates nothing before it is asked. For such a drafter the estimate comes
from counts: how often the token at each position was accepted, given that those before it were.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MEMORY = 0.98  # weight of a draft after each newer one: about the last 50 drafts count
_FIRST_RATE = 0.6  # belief before any draft was seen
_FIRST_TRUST = 3.0  # number of drafts that it counts for, as does the rate of the position before
# Number of a request's drafts that the common rate counts for. Few drafts mislead: where requests
# compete for places in a pass, one that had bad luck gets none, so its estimate stays wrong. (192
# answers of the demo pair, their drafts replayed at the costs of TinyLlama's passes: four requests
# had 1.130 times plain decoding's speed with 3 and have 1.144 with 8, one 2.14 and 2.13.)
_TRUST = 8.0


class Acceptance:
    """The acceptance of one drafter's draft tokens by position.

    Args:
        positions: length of the longest draft.
        common: the same drafter's acceptance over all requests; None for that one itself.
    """

    __slots__ = ("_accepted", "_believed", "_common", "_rates", "_tried")

    def __init__(self, positions: int, common: Acceptance | None = None) -> None:
        self._tried = [0.0] * positions
        self._accepted = [0.0] * positions
        self._common = common
        self._rates: list[float] = []  # empty where they have to be computed
        self._believed: list[float] | None = None  # the common rates that they were computed with

    def observe(self, draft_tokens: int, accepted: int) -> None:
        """Take in one draft: the number of verified draft tokens, and of accepted ones."""
        # A rejected token makes the context of the tokens behind it wrong: they were not tried.
        reached = min(draft_tokens, accepted + 1)
        for position in range(len(self._tried)):
            tried = position < reached
            self._tried[position] = self._tried[position] * _MEMORY + tried
            hit = tried and position < accepted
            self._accepted[position] = self._accepted[position] * _MEMORY + hit
        self._rates = []

    def rates(self) -> list[float]:
        """[positions], the probability that each is accepted, given that those before it are.

        A position with few tries follows what is known otherwise: the rate over all requests, or
        else the rate of the position before it. The caller must not change the list.
        """
        beliefs = self._common.rates() if self._common else None
        if self._rates and beliefs is self._believed:
            return self._rates
        trust = _FIRST_TRUST if beliefs is None else _TRUST
        rates, before = [], _FIRST_RATE
        for position, (tried, hits) in enumerate(zip(self._tried, self._accepted, strict=True)):
            belief = before if beliefs is None else beliefs[position]
            before = (hits + trust * belief) / (tried + trust)
            rates.append(before)
        self._rates, self._believed = rates, beliefs
        return rates


@dataclass(slots=True)
class SpeculationState:
    """What speculation has brought to one request so far. The controller writes it.

    Attributes:
        acceptance: by drafter; only of drafters that do not estimate it.
        seconds: time of the request's steps, by the cost model.
        plain_seconds: time that plain decoding would have taken for the same tokens.
        adjusting: mean seconds that it takes to adjust the logits of one position: penalties,
            biases, forbidden words and grammars; 0 where the request has none.
        gains: by drafter that was asked, mean seconds that asking it saves, less what it takes.
    """

    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    seconds: float = 0.0
    plain_seconds: float = 0.0
    adjusting: float = 0.0
    gains: dict[str, float] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """Estimated speed over plain decoding so far; 1 before anything was decoded."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0
