"""What draft heads and draft models share: they guess one token after the other, in passes.

A pass makes the next guess of all requests that asked together. Each request goes on while its next
guess seems to pay: the tokens that it may bring must be worth a share of a pass.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import ModelRunner
from specops.runtime.sampling import Floats, draw_seeded, filtered_probs, logprob
from specops.speculation.drafters.accept_probs import Calibration
from specops.speculation.drafters.base import NO_DRAFT, Draft, DraftContext, Drafter

_KINDS = 6
_FIRST_PROMISE = 0.5  # of the mean promises, before there were any
_WEIGHT = 1 / 48  # of the newest promise in them
_DOUBT = _WEIGHT / 256  # of the promise of the guess before, where a guess was not worth its time


class GuessingDrafter(Drafter):
    """Guesses token by token with its own model.

    Args:
        runner: the model, with as many slots as the target has.
        costs: of its passes, with what chooses a token; it learns from each.
        tokens: the tokens that it can guess, in the order of its logits.
        depth: largest number of guesses in a row.
        fitted: see `Calibration`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        costs: CostModel,
        tokens: Sequence[int],
        depth: int,
        fitted: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.runner, self.costs = runner, costs
        self._tokens, self._depth = tokens, depth
        self._rows: slice | npt.NDArray[np.int64] = np.array(tokens)  # by token, as noise is
        if isinstance(tokens, range):
            self._rows = slice(tokens.start, tokens.stop)
        self._probs: Floats = np.zeros(max(tokens) + 1, np.float32)
        self._calibration = Calibration(fitted, depth, _KINDS)
        self._latest = self._calibration.latest
        self._usual = [_FIRST_PROMISE] * depth  # mean promise of each guess in a row
        self._begun = 0.0  # when work on the next pass began

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See `Drafter.propose`."""
        self._begun = time.perf_counter()
        going, guess = self._first(contexts), 0
        guessed = {context.slot for context in going}
        while going:
            share = self.costs.cost(len(going)) / len(going)
            rows = [row for row, item in enumerate(going) if self._pays(guess, item, share)]
            guess += 1
            going = self._next(guess, [going[row] for row in rows], rows) if rows else []
        return [
            self._draft(context) if context.slot in guessed else NO_DRAFT for context in contexts
        ]

    @abstractmethod
    def _first(self, contexts: Sequence[DraftContext]) -> list[DraftContext]:
        """Read the new parts of the texts, and guess the next token of each.

        Returns:
            Those with a guess, in the order of their rows; the others have no room.
        """

    @abstractmethod
    def _next(
        self, guess: int, contexts: Sequence[DraftContext], rows: Sequence[int]
    ) -> list[DraftContext]:
        """Guess one more token of each, after `guess` others; see `_first`.

        `rows` are the places of `contexts` in what the call before this one returned.
        """

    def _forward(self, batch: Batch) -> Floats:
        """Run a pass. It ends with the work on the next one: tokens have to be chosen, too."""
        logits = self.runner.forward(batch)
        now = time.perf_counter()
        spans = len(batch.spans)
        self.costs.observe(batch.num_tokens, batch.attention_work, now - self._begun, spans)
        self._begun = now
        return logits

    def _guess(self, guess: int, context: DraftContext, logits: Floats) -> None:
        """Choose a request's next guess from [V] logits."""
        token, confidence = self._choose(guess, context, logits)
        kind = self._kind(context, token)
        guesses = self._latest[context.slot]
        probability = self._calibration.add(guesses, token, confidence, kind)
        self._usual[guess] += _WEIGHT * (probability - self._usual[guess])

    def _choose(self, guess: int, context: DraftContext, logits: Floats) -> tuple[int, float]:
        """The next token of a draft, and how sure it is.

        Drawn by the target's noise it is the target's more often than the likeliest: of two equally
        likely ones that in two draws out of two. How sure a drafter is of the likeliest says more
        about this than how likely the drawn one was.
        """
        if context.noise is None:
            ((row, confidence),) = logprob(logits, 0, 1).top
            return self._tokens[row], math.exp(confidence)
        (probs,) = filtered_probs(logits[None], context.sampling)
        self._probs[self._rows] = probs
        token = draw_seeded(self._probs, context.noise, len(context.text) + guess)
        return token, float(probs.max())

    def _kind(self, context: DraftContext, token: int) -> int:
        """What a draft's next token has to be calibrated by: below `_KINDS`.

        What is drawn is less often the likeliest token. And a lookup that says the same is evidence
        of another kind, as one that says something else is evidence against it.
        """
        tokens = (*self._latest[context.slot].tokens, token)
        found = context.draft.tokens[: len(tokens)]
        seen = len(found) == len(tokens)
        return 3 * (context.sampling.temperature > 0) + seen * (1 + (found == tokens))

    def _pays(self, guess: int, context: DraftContext, share: float) -> bool:
        """Whether a request's next guess is worth its `share` of a pass, in seconds."""
        following = guess + 1
        if following >= min(context.max_draft, self._depth):
            return False
        usual = self._usual[following]
        reach = self._latest[context.slot].reach * usual
        if not context.adaptive or reach >= context.min_reach + share / context.token_seconds:
            return True
        # What is never tried cannot prove better: in the end it is tried again, but rarely.
        self._usual[following] += _DOUBT * (self._usual[guess] - usual)
        return False

    def _draft(self, context: DraftContext) -> Draft:
        """The request's draft; an adaptive one ends before tokens that are rarely reached."""
        draft = self._latest[context.slot].draft
        if context.adaptive:
            return draft.likely(context.max_draft, context.min_reach)
        return draft
