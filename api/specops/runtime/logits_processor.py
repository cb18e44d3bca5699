"""Adjusts logits by the tokens before them: penalties, biases and forbidden words.

The order is vLLM's: allowed tokens, forbidden words and end tokens, then biases, then the penalties
for repetition, frequency and presence. A position's logits depend only on the tokens before it, so
draft tokens are verified against the same numbers as in plain decoding. The kernels do the
arithmetic, for all positions of a draft at once (`kernels/sampling.c`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from specops.request import SamplingParams
from specops.runtime.kernels import Adjustment, library
from specops.runtime.sampling import Floats, address, mask

_FIRST_CAPACITY = 64  # different tokens
_MIN_PENALTY = 1e-6  # a logit that is divided by a smaller one may become infinite
_TOKEN_BYTES = array("i").itemsize


class LogitsProcessor:
    """Counts the tokens of one answer and adjusts its next logits.

    Args:
        params: the request's parameters; their token ids are in the vocabulary.
        prompt: tokens of the prompt.
        end_tokens: tokens that are forbidden in the first `min_tokens`.
        min_tokens: minimum length of the answer, in tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        end_tokens: Collection[int],
        min_tokens: int,
    ) -> None:
        self._bits: npt.NDArray[np.uint32] | None = None
        self._allowed = np.array(params.allowed_tokens, np.int64)
        self._end_tokens = sorted(end_tokens)
        self._min_tokens = min_tokens
        # The answer and the start of each word as bytes, so that comparing their ends takes 0.1 us.
        self._answer = bytearray()
        self._words = [(array("i", word[:-1]).tobytes(), word[-1]) for word in params.bad_words]
        self._counts_tokens = params.penalizes
        known = np.unique(prompt if params.repetition_penalty != 1 else []).astype(np.int32)
        # Each token's index in the three arrays, which have room for as many tokens again.
        self._index_of: dict[int, int] = dict(zip(known.tolist(), range(len(known)), strict=True))
        room = np.zeros(max(_FIRST_CAPACITY, len(known)), np.int32)
        self._tokens = np.concatenate([known, room])
        self._counts = np.zeros(len(self._tokens), np.float32)  # in the answer
        self._in_prompt = np.zeros(len(self._tokens), np.float32)
        self._in_prompt[: len(known)] = 1
        self._biased = np.array([token for token, _ in params.logit_bias], np.int32)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._adjustment = Adjustment(
            max(_MIN_PENALTY, params.repetition_penalty),
            params.frequency_penalty,
            params.presence_penalty,
        )
        if params.logit_bias:
            self._adjustment.num_biased = len(self._biased)
            self._adjustment.biased, self._adjustment.biases = (
                address(self._biased),
                address(self._biases),
            )
        self._set_addresses()

    def append(self, token: int) -> None:
        """Append a token to the answer."""
        self._answer += token.to_bytes(_TOKEN_BYTES, sys.byteorder)
        if self._counts_tokens:
            index = self._index(token)  # before the arrays are read, since it may replace them
            self._counts[index] += 1

    def apply(self, logits: Floats, tokens: Sequence[int]) -> None:
        """Adjust logits in place.

        Args:
            logits: [k + 1, V], contiguous: row 0 chooses the first of the last k tokens, each
                further row the token after one of them.
            tokens: tokens after the answer, such as draft tokens; they are not appended to it.
        """
        rows, vocab = logits.shape
        if len(self._allowed):
            mask(logits, np.tile(self._allowed_bits(vocab), (rows, 1)))
        first = len(tokens) + 1 - rows
        length = len(self._answer)
        for token in tokens[:first]:
            self.append(token)
        banned, ends, indices = array("i"), array("q"), array("q")
        for row in range(rows):
            if row:
                token = tokens[first + row - 1]
                self._answer += token.to_bytes(_TOKEN_BYTES, sys.byteorder)
                indices.append(self._index(token) if self._counts_tokens else 0)
            self._ban(banned)
            ends.append(len(banned))
        self._adjustment.num_known = len(self._index_of)
        library.specops_adjust(
            address(logits), rows, vocab, banned.buffer_info()[0], ends.buffer_info()[0],
            indices.buffer_info()[0], self._adjustment,
        )  # fmt: skip
        del self._answer[length:]
        for token in tokens[:first] if self._counts_tokens else ():
            self._counts[self._index_of[token]] -= 1

    def _allowed_bits(self, vocab: int) -> npt.NDArray[np.uint32]:
        """The allowed tokens as bits, in the format of `mask`."""
        if self._bits is None:
            allowed = np.zeros(-(-vocab // 32) * 32, np.uint8)
            allowed[self._allowed] = 1
            self._bits = np.packbits(allowed, bitorder="little").view(np.uint32)
        return self._bits

    def _ban(self, banned: array[int]) -> None:
        """Add the tokens that must not follow the answer."""
        if self._words:
            ends_with = self._answer.endswith
            banned.extend(last for before, last in self._words if ends_with(before))
        if len(self._answer) < self._min_tokens * _TOKEN_BYTES:
            banned.extend(self._end_tokens)

    def _index(self, token: int) -> int:
        index = self._index_of.setdefault(token, len(self._index_of))
        if index == len(self._tokens):
            self._tokens, self._counts, self._in_prompt = (
                np.concatenate([values, np.zeros_like(values)])
                for values in (self._tokens, self._counts, self._in_prompt)
            )
            self._set_addresses()
        self._tokens[index] = token
        return index

    def _set_addresses(self) -> None:
        """Pass the kernels the addresses of the arrays."""
        self._adjustment.known, self._adjustment.counts, self._adjustment.in_prompt = map(
            address, (self._tokens, self._counts, self._in_prompt)
        )
