"""Draft tokens by a head of the target's own, which reads the hidden state behind its last token.

The head has no state: what it needs is the target's latest hidden state and the token chosen by it.
So there is nothing to catch up with, prompts cost it nothing, and a pass is a few small products.
All slots that have moved on share it. How sure it is was fitted on other texts than those that it
is asked about, so what it promises is corrected by the tokens that come. Where guesses bring less
than their passes take, as for a very small target, it falls silent and tries again now and then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from specops.runtime.cost_model import CostModel, mean_with
from specops.runtime.model_runner import DraftHead, HiddenStates
from specops.speculation.drafters.base import LEAST_REACH, NO_DRAFT, Draft, LookupDrafter

_LEAST_SURE = 0.5  # of a guess that another one is built upon
_WEIGHT = 1 / 32  # of a pass in what passes take and bring
_SILENT = 32  # look-ups between two passes that are made although they do not seem to pay
_EDGE = 1e-6  # of probabilities whose logits are taken
# Of what a token that came corrects a promise's logit by: a thousand tokens' memory, and a promise
# that shakes by 0.012.
_LEARN = 0.005


class HeadDrafter(LookupDrafter):
    """Guesses one token or a few.

    Args:
        head: guesses.
        states: of the target's slots.
        tokens: that the head can guess, in the order of its table.
        calibration: for each guess in a row, see `HeadFolder`.
        costs: of the target's passes.
        clock: seconds.
    """

    name = "head"

    def __init__(
        self,
        head: DraftHead,
        states: HiddenStates,
        tokens: Sequence[int],
        calibration: Sequence[tuple[float, float]],
        *,
        costs: CostModel,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._head = head
        self._states = states
        self._tokens = tokens
        self._codes = {token: code for code, token in enumerate(tokens)}
        self._factors = [factor for factor, _ in calibration]
        self._summands = [summand for _, summand in calibration]
        self._costs = costs
        self._clock = clock
        self._seconds = 0.0  # mean of a pass
        self._gain = 0.0  # mean of the seconds that a pass's guesses bring, less what it takes
        self._silent = 0  # look-ups since the last pass
        self._drafts: dict[int, Draft] = {}  # by slot, for the states that it has now
        self._open: dict[int, tuple[int, Draft]] = {}  # put forward, not judged yet; its place

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Forget the slot's last sequence."""
        self.release(slot)

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, least: float = LEAST_REACH
    ) -> Draft:
        """The guess for the slot; made for all slots that have none yet."""
        if not self._states.has(slot, len(tokens) - 1):
            return NO_DRAFT
        if slot in self._states.fresh:
            self._silent += 1
            if self._gain < 0 and self._silent < _SILENT:
                return NO_DRAFT
            self._guess()
        draft, reach, likely = self._drafts[slot], 1.0, 0
        self._judge(slot, tokens)
        for promised in draft.promised[:count]:
            reach *= promised
            if reach < least:
                break
            likely += 1
        if not likely:
            return NO_DRAFT
        self._open[slot] = len(tokens), draft
        return draft.cut(likely)

    def release(self, slot: int) -> None:
        """Forget the slot's sequence."""
        self._states.forget(slot)
        self._drafts.pop(slot, None)
        self._open.pop(slot, None)

    def _judge(self, slot: int, tokens: Sequence[int]) -> None:
        """Learn from the tokens that have come in the place of a draft, verified or not."""
        place, draft = self._open.pop(slot, (len(tokens), NO_DRAFT))
        for guess, promised in enumerate(draft.promised[: len(tokens) - place]):
            right = tokens[place + guess] == draft.tokens[guess]
            self._summands[guess] += _LEARN * (right - promised)
            if not right:
                return

    def _guess(self) -> None:
        """Make drafts for all slots with fresh states, and note whether that pays."""
        slots = sorted(self._states.fresh)
        self._states.fresh.clear()
        start = self._clock()
        self._draft(slots)
        seconds = self._clock() - start
        self._seconds = mean_with(self._seconds, seconds, _WEIGHT)
        gain, count, self._silent = 0.0, len(slots), 0
        token, wider = self._costs.cost(count) / count, self._costs.cost(count + 1)
        for slot in slots:
            first = self._drafts[slot].promised[0]
            gain += max(0.0, first * token - (wider - self._costs.cost(count)))
        self._gain += _WEIGHT * (gain - self._seconds - self._gain)

    def _draft(self, slots: list[int]) -> None:
        other = len(self._tokens)
        codes, states = self._head.codes, self._head.states
        for row, slot in enumerate(slots):
            codes[row] = self._codes.get(self._states.chosen[slot], other)
            states[row] = self._states.rows[slot]
        self._drafts.update(dict.fromkeys(slots, NO_DRAFT))
        for factor, summand in zip(self._factors, self._summands, strict=True):
            best, sure = self._head.guess(len(slots))
            going_on: list[int] = []
            for row, slot in enumerate(slots):
                before = self._drafts[slot]
                promised = _promised(float(sure[row]), factor, summand)
                self._drafts[slot] = Draft(
                    (*before.tokens, self._tokens[best[row]]),
                    promised=(*before.promised, promised),
                )
                if promised >= _LEAST_SURE:
                    codes[len(going_on)] = best[row]
                    states[len(going_on)] = self._head.next_states[row]
                    going_on.append(slot)
            slots = going_on
            if not slots:
                return


def _promised(sure: float, factor: float, summand: float) -> float:
    """The probability that a guess is accepted, by how sure the head is."""
    sure = min(max(sure, _EDGE), 1 - _EDGE)
    return 1 / (1 + math.exp(-(factor * math.log(sure / (1 - sure)) + summand)))
