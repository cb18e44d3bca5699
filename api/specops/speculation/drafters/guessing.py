"""The common part of draft heads and draft models: they guess one token per pass.

A pass makes the next guess for all requests that asked together. Each request continues while its
next guess seems to pay: its expected tokens must be worth a share of a pass.
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
_FIRST_PROMISE = 0.5  # initial mean of the promised probabilities
_WEIGHT = 1 / 48  # of the newest promise in a mean
_DOUBT = _WEIGHT / 256  # of the previous guess's mean, whenever a guess was not worth its time


class GuessingDrafter(Drafter):
    """Guesses token by token with its own model.

    Args:
        runner: the model, with as many slots as the target.
        costs: costs of its passes, including the choice of a token; it learns from each pass.
        tokens: the tokens that it can guess, in the order of its logits.
        depth: maximum number of guesses in a row.
    """

    def __init__(
        self, runner: ModelRunner, costs: CostModel, tokens: Sequence[int], depth: int
    ) -> None:
        self.runner, self.costs = runner, costs
        self._tokens, self._depth = tokens, depth
        self._rows: slice | npt.NDArray[np.int64] = np.array(tokens)  # noise is by token, too
        if isinstance(tokens, range):
            self._rows = slice(tokens.start, tokens.stop)
        self._probs: Floats = np.zeros(max(tokens) + 1, np.float32)
        self._calibration = Calibration(depth, _KINDS)
        self._latest = self._calibration.latest
        self._usual = [_FIRST_PROMISE] * depth  # mean promise of each guess in a row
        self._begun = 0.0  # start of the work on the next pass

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
            The requests with a guess, in the order of their rows; the others have no room.
        """

    @abstractmethod
    def _next(
        self, guess: int, contexts: Sequence[DraftContext], rows: Sequence[int]
    ) -> list[DraftContext]:
        """Guess one more token for each request; see `_first`.

        Args:
            guess: number of guesses so far.
            contexts: the requests.
            rows: their indices in the result of the previous call.
        """

    def _forward(self, batch: Batch) -> Floats:
        """Run a pass. Its time starts with the work before it, so that choosing tokens counts."""
        logits = self.runner.forward(batch)
        now = time.perf_counter()
        work, spans = batch.attention_work, len(batch.spans)
        self.costs.observe(batch.num_tokens, work, now - self._begun, spans, batch.num_logits)
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
        """The next token of a draft, and the drafter's confidence.

        A token drawn by the target's noise is right more often than the most likely one: of two
        equally likely tokens the noise picks the same one for both. The probability of the most
        likely token predicts this better than that of the drawn one.
        """
        if context.noise is None:
            ((row, confidence),) = logprob(logits, 0, 1).top
            return self._tokens[row], math.exp(confidence)
        (probs,) = filtered_probs(logits[None], context.sampling)
        self._probs[self._rows] = probs
        token = draw_seeded(self._probs, context.noise, len(context.text) + guess)
        return token, float(probs.max())

    def _kind(self, context: DraftContext, token: int) -> int:
        """The kind of a draft's next token, below `_KINDS`; each kind is calibrated separately.

        A drawn token is the most likely one less often. And a lookup that proposes the same token
        is evidence for it, one that proposes another is evidence against it.
        """
        tokens = (*self._latest[context.slot].tokens, token)
        found = context.draft.tokens[: len(tokens)]
        seen = len(found) == len(tokens)
        return 3 * (context.sampling.temperature > 0) + seen * (1 + (found == tokens))

    def _pays(self, guess: int, context: DraftContext, share: float) -> bool:
        """Whether a request's next guess is worth its share of a pass.

        Args:
            guess: number of guesses so far, minus 1.
            context: the request.
            share: its share of a pass in seconds.
        """
        following = guess + 1
        if following >= min(context.max_draft, self._depth):
            return False
        usual = self._usual[following]
        reach = self._latest[context.slot].reach * usual
        least = context.reaches[following] if context.reaches else context.min_reach
        if not context.adaptive or reach >= least + share / context.token_seconds:
            return True
        # A guess that is never tried cannot improve: so it is tried again in the end, but rarely.
        self._usual[following] += _DOUBT * (self._usual[guess] - usual)
        return False

    def _draft(self, context: DraftContext) -> Draft:
        """The request's draft; if adaptive, it ends before tokens that are rarely reached."""
        draft = self._latest[context.slot].draft
        if context.adaptive:
            return draft.likely(context.max_draft, context.min_reach)
        return draft
