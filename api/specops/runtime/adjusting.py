"""Changes logits by the tokens before them: penalties, biases and forbidden words.

The order is vLLM's: forbidden words and end tokens, then biases, then the penalties for repetition,
frequency and presence. A position's logits depend only on the tokens before it, so draft tokens are
verified against the same numbers that plain decoding would choose from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from specops.request import SamplingParams
from specops.runtime.sampling import Floats

_FIRST_CAPACITY = 64  # different tokens


class Adjuster:
    """Counts the tokens of one answer and adjusts its next logits.

    Args:
        params: of the request.
        prompt: tokens of the prompt.
        end_tokens: tokens that are forbidden among the first `min_tokens`.
        min_tokens: least length of the answer.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        end_tokens: Collection[int],
        min_tokens: int,
    ) -> None:
        self._params = params
        self._end_tokens = np.array(sorted(end_tokens), np.intp)
        self._min_tokens = min_tokens
        self._biased = np.array([token for token, _ in params.logit_bias], np.intp)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._answer: list[int] = []
        self._places: dict[int, int] = {}  # each token's index in the three arrays
        self._tokens = np.zeros(_FIRST_CAPACITY, np.intp)
        self._counts = np.zeros(_FIRST_CAPACITY, np.float32)  # in the answer
        self._in_prompt = np.zeros(_FIRST_CAPACITY, np.float32)  # filled if a penalty asks for it
        if params.repetition_penalty != 1:
            for token in dict.fromkeys(prompt):
                place = self._place(token)
                self._in_prompt[place] = 1

    def take(self, token: int) -> None:
        """Append a token to the answer."""
        self._answer.append(token)
        place = self._place(token)  # first, since it may replace the arrays
        self._counts[place] += 1

    def adjust(self, logits: Floats, tokens: Sequence[int]) -> None:
        """Change logits in place.

        Args:
            logits: [k + 1, V]: row 0 stands before the last k of the tokens, each further row
                behind one of them.
            tokens: may follow the answer; they are not appended to it.
        """
        first = len(tokens) + 1 - len(logits)
        for token in tokens[:first]:
            self.take(token)
        self._adjust(logits[0])
        for row, token in zip(logits[1:], tokens[first:], strict=True):
            self.take(token)
            self._adjust(row)
        for token in tokens:
            self._answer.pop()
            self._counts[self._places[token]] -= 1

    def _adjust(self, logits: Floats) -> None:
        params = self._params
        for word in params.bad_words:
            *before, last = word
            if not before or self._answer[-len(before) :] == before:
                logits[last] = -np.inf
        if len(self._answer) < self._min_tokens:
            logits[self._end_tokens] = -np.inf
        logits[self._biased] += self._biases
        if not params.penalizes:
            return
        known = len(self._places)
        tokens, counts = self._tokens[:known], self._counts[:known]
        values = logits[tokens]
        if params.repetition_penalty != 1:
            repeated = (counts + self._in_prompt[:known]) > 0
            factor = np.float32(params.repetition_penalty)
            penalized = np.where(values > 0, values / factor, values * factor)
            values = np.where(repeated, penalized, values)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        logits[tokens] = values

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens, self._counts, self._in_prompt = (
                np.concatenate([array, np.zeros_like(array)])
                for array in (self._tokens, self._counts, self._in_prompt)
            )
        self._tokens[place] = token
        return place
