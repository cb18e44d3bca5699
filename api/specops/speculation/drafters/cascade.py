"""Looked-up draft tokens where there are any, a model's elsewhere: the cheaper source comes first.

A lookup costs microseconds and is right where a text repeats itself. A draft model costs a pass per
token and is right elsewhere. A draft head is in between: its guess costs so little that it is
looked up, too, where the lookup before it is not sure; the likelier one of the two is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from specops.speculation.drafters.base import LEAST_REACH, Draft, Drafter, DraftRequest

_SURE = 0.5  # promise of a lookup from which on the head is not asked


class CascadeDrafter:
    """Asks a lookup first and a model second, and says which one the draft tokens are from.

    Both are drafters with a name of their own; requests may have only one of them. What a request
    with both begins and ends, each of them begins and ends.

    Args:
        lookup: a drafter without a model.
        model: a draft model, or a draft head.
    """

    name = "cascade"

    def __init__(self, lookup: Drafter, model: Drafter) -> None:
        self._lookup = lookup
        self._model = model
        self.runs_model = model.runs_model

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Begin a slot of both."""
        for part in (self._lookup, self._model):
            part.begin(slot, tokens, client)

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, least: float = LEAST_REACH
    ) -> Draft:
        """The lookup's draft, or the head's; without tokens it names the lookup."""
        draft, origin = self._lookup.look_up(slot, tokens, count, least), self._lookup.name
        believed = draft.promised[0] if draft.promised else 0.0
        if not self.runs_model and believed < _SURE:
            # A head learns from its guesses that are used: it must know which ones are not.
            guess = self._model.look_up(slot, tokens, count, max(least, believed))
            if guess.tokens:
                draft, origin = guess, self._model.name
        return Draft(draft.tokens, draft.probs, origin, draft.promised)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """The model's drafts: the engine has tried the lookup before."""
        drafts = self._model.propose(requests)
        return [draft._replace(origin=self._model.name) for draft in drafts]

    def backlog(self, slot: int, length: int) -> int:
        """The model's backlog."""
        return self._model.backlog(slot, length)

    def prefill(self, slot: int, tokens: Sequence[int], most: int) -> int:
        """Let the model compute; see `Drafter.prefill`."""
        return self._model.prefill(slot, tokens, most)

    def release(self, slot: int) -> None:
        """Release the slot of both."""
        try:
            self._lookup.release(slot)
        finally:
            self._model.release(slot)
