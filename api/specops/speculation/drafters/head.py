"""Draft tokens by a draft head: a small network that reads the target's last hidden state.

The head has no state of its own. It needs the target's latest hidden state and the token that was
chosen by it. So it never has to catch up, prompts cost it nothing, and one small pass serves all
slots that have moved on. Its confidence was fitted on other texts than those that it meets here, so
the tokens that come correct its probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

from specops.runtime.model_runner import DraftHead, HiddenStates
from specops.speculation.drafters.base import LEAST_REACH, NO_DRAFT, Draft, LookupDrafter
from specops.speculation.drafters.calibration import Calibration

_LEAST_SURE = 0.5  # least promise of a guess for another guess to be built upon it


class HeadDrafter(LookupDrafter):
    """Guesses the next token, and more tokens where it is sure.

    Args:
        head: computes the guesses.
        states: the hidden states of the target's slots.
        tokens: the tokens that the head can guess, in the order of its table.
        calibration: factor and summand for the logit of each guess in a row, see `HeadFolder`.
    """

    name = "head"

    def __init__(
        self,
        head: DraftHead,
        states: HiddenStates,
        tokens: Sequence[int],
        calibration: Sequence[tuple[float, float]],
    ) -> None:
        self._head = head
        self._states = states
        self._tokens = tokens
        self._codes = {token: code for code, token in enumerate(tokens)}
        self._calibration = Calibration(calibration, len(calibration))
        self._drafts: dict[int, Draft] = {}  # by slot, for its present state
        self._open: dict[int, tuple[int, Draft]] = {}  # by slot: position, and draft to be judged

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Forget the slot's last sequence."""
        self.release(slot)

    def follows(self, slot: int, tokens: Sequence[int]) -> bool:
        """Whether it has the state before the last token."""
        return self._states.has(slot, len(tokens) - 1)

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, min_reach: float = LEAST_REACH
    ) -> Draft:
        """The guesses for the slot. One pass makes them for all slots that have none yet."""
        if not self.follows(slot, tokens):
            return NO_DRAFT
        if slot in self._states.fresh:
            slots = sorted(self._states.fresh)
            self._states.fresh.clear()
            self._draft(slots)
        self._judge(slot, tokens)
        draft = self._drafts[slot]
        found = draft.likely(count, min_reach)
        if found.tokens:
            self._open[slot] = len(tokens), draft
        return found

    def release(self, slot: int) -> None:
        """Forget the slot's sequence."""
        self._states.forget(slot)
        self._drafts.pop(slot, None)
        self._open.pop(slot, None)

    def _judge(self, slot: int, tokens: Sequence[int]) -> None:
        """Learn from the tokens that came in the place of a draft, whether verified or not."""
        place, draft = self._open.pop(slot, (len(tokens), NO_DRAFT))
        self._calibration.learn(draft, tokens[place:])

    def _draft(self, slots: list[int]) -> None:
        other = len(self._tokens)
        codes, states = self._head.codes, self._head.states
        for row, slot in enumerate(slots):
            codes[row] = self._codes.get(self._states.chosen[slot], other)
            states[row] = self._states.rows[slot]
        self._drafts.update(dict.fromkeys(slots, NO_DRAFT))
        for guess in range(self._calibration.depth):
            best, sure = self._head.guess(len(slots))
            going_on: list[int] = []
            for row, slot in enumerate(slots):
                before = self._drafts[slot]
                probability = self._calibration.promise(guess, float(sure[row]))
                tokens = (*before.tokens, self._tokens[best[row]])
                probabilities = (*before.accept_probs, probability)
                self._drafts[slot] = Draft(tokens, accept_probs=probabilities)
                if probability >= _LEAST_SURE:
                    codes[len(going_on)] = best[row]
                    states[len(going_on)] = self._head.next_states[row]
                    going_on.append(slot)
            slots = going_on
            if not slots:
                return
