"""Logits changed by what came before: penalties, biases, and words that must not come.

In the order of vLLM: what must not come, biases, then the penalties for repetition, frequency and
presence. A position's logits depend on the tokens before it and on nothing else, so draft tokens
are verified against the same numbers that plain decoding would choose from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from specops.request import SamplingParams
from specops.runtime.sampling import Floats

_ROOM = 64  # different tokens at first


class Adjuster:
    """What one answer has said so far, and what that does to its next logits.

    Args:
        params: of the request.
        prompt: its tokens.
        end_tokens: that must not come among the first `min_tokens`.
        min_tokens: of the answer.
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
        self._ends = np.array(sorted(end_tokens), np.intp)
        self._min_tokens = min_tokens
        self._biased = np.array([token for token, _ in params.logit_bias], np.intp)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._answer: list[int] = []
        self._places: dict[int, int] = {}  # of a token in the arrays
        self._tokens = np.zeros(_ROOM, np.intp)
        self._said = np.zeros(_ROOM, np.float32)  # how often it is in the answer
        self._held = np.zeros(_ROOM, np.float32)  # and in the prompt, where that counts
        if params.repetition_penalty != 1:
            for token in dict.fromkeys(prompt):
                place = self._place(token)
                self._held[place] = 1

    def take(self, token: int) -> None:
        """The answer goes on with a token."""
        self._answer.append(token)
        place = self._place(token)  # which may make room
        self._said[place] += 1

    def adjust(self, logits: Floats, tokens: Sequence[int]) -> None:
        """Change logits in place.

        Args:
            logits: [k + 1, V], of the last k of the tokens and of what is before them.
            tokens: that may follow the answer so far.
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
            self._said[self._places[token]] -= 1

    def _adjust(self, logits: Floats) -> None:
        params = self._params
        for word in params.bad_words:
            *before, last = word
            if not before or self._answer[-len(before) :] == before:
                logits[last] = -np.inf
        if len(self._answer) < self._min_tokens:
            logits[self._ends] = -np.inf
        logits[self._biased] += self._biases
        if not params.penalizes:
            return
        count = len(self._places)
        tokens, said = self._tokens[:count], self._said[:count]
        values = logits[tokens]
        if params.repetition_penalty != 1:
            repeated = (said + self._held[:count]) > 0
            factor = np.float32(params.repetition_penalty)
            penalized = np.where(values > 0, values / factor, values * factor)
            values = np.where(repeated, penalized, values)
        values -= np.float32(params.frequency_penalty) * said
        values -= np.float32(params.presence_penalty) * (said > 0)
        logits[tokens] = values

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._tokens):
                for name in ("_tokens", "_said", "_held"):
                    array = getattr(self, name)
                    setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
            self._tokens[place] = token
        return place
