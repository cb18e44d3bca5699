"""Looked-up draft tokens where there are any, a model's elsewhere: the cheap before the dear.

A lookup costs microseconds and is right where text repeats itself; a draft model costs a pass per
token and is right elsewhere. A draft head is in between: its guess costs so little that it is
looked up, too, where the lookup before it is not sure; the likelier of both is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specops.speculation.drafters.base import LEAST_REACH, Draft, Drafter, DraftRequest

_SURE = 0.5  # of a lookup that is believed without asking a head


class CascadeDrafter:
    """Asks its parts in turn and says whose draft tokens they are.

    The parts are drafters that can be asked for by name, too, and keep their slots themselves:
    the engine, which begins and releases the slots of all drafters, has told them.

    Args:
        lookup: runs no model.
        model: a draft model, or a head.
    """

    name = "cascade"

    def __init__(self, lookup: Drafter, model: Drafter) -> None:
        self._lookup = lookup
        self._model = model
        self.runs_model = model.runs_model

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Nothing: the parts are told themselves."""

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, least: float = LEAST_REACH
    ) -> Draft:
        """What the lookup has, or a head; without tokens, too, it is said which has nothing."""
        draft = self._lookup.look_up(slot, tokens, count, least)
        believed = draft.promised[0] if draft.promised else 0.0
        if not self.runs_model and believed < _SURE:
            # A head learns from what it puts forward: it has to know what would not be taken.
            guess = self._model.look_up(slot, tokens, count, max(least, believed))
            if guess.tokens:
                return replace(guess, origin=self._model.name)
        return draft if draft.origin else replace(draft, origin=self._lookup.name)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """What the model proposes: a lookup has been tried before."""
        return [replace(draft, origin=self._model.name) for draft in self._model.propose(requests)]

    def backlog(self, slot: int, length: int) -> int:
        """What the model has to take in."""
        return self._model.backlog(slot, length)

    def take_in(self, slot: int, tokens: Sequence[int], most: int) -> int:
        """Let the model compute; see `Drafter.take_in`."""
        return self._model.take_in(slot, tokens, most)

    def release(self, slot: int) -> None:
        """Nothing: the parts forget the slot themselves."""
