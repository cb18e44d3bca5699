"""Guesses by a smaller model of the same vocabulary, with a KV cache of its own.

Rejected guesses stay in its cache until the next call, which compares what was fed with what
became of the sequence and goes on from the first difference: nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from specops.decoder import Decoder
from specops.drafters.base import NO_DRAFT, Draft
from specops.kv_cache import common_prefix
from specops.request import SamplingParams
from specops.sampling import Floats, draw, draw_seeded, filtered_probs

_UNKNOWN = 0  # stands for the target's tokens that the draft has no embedding for


class DraftModelDrafter:
    """Runs the draft model token by token.

    Args:
        decoder: the draft model over as many rows as the target has.
        vocab_size: the target's; the draft never guesses an id beyond it.
        min_probability: the first guess that the draft itself gives less than this, after the
            request's own filters, is the last. It is still offered: its pass is paid for, and
            guesses that were kept or left out by what was drawn would not be distributed as
            they claim.
    """

    name = "draft"
    runs_model = True

    def __init__(self, decoder: Decoder, *, vocab_size: int, min_probability: float = 0.0) -> None:
        self._decoder = decoder
        self._vocab = min(vocab_size, decoder.vocab_size)
        self._target_vocab = vocab_size
        self._min_probability = min_probability
        self._fed: dict[int, list[int]] = {}  # row: the tokens in its cache
        self._sure: dict[int, int] = {}  # row: how many of them are no guesses

    def start(self, row: int, tokens: Sequence[int], like: int) -> None:
        """Keep the longest beginning that this row's cache or that of `like` has of the prompt."""
        own, other = (common_prefix(self._fed.get(place, ()), tokens) for place in (row, like))
        if other > own:
            self._decoder.cache.copy(like, row, other)
        else:
            self._decoder.cache.truncate(row, own)
        same = max(own, other)
        self._fed[row], self._sure[row] = list(tokens[:same]), same

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Feed what is new of the prompt, as far as the draft's context reaches."""
        self._feed(row, tokens[len(self._fed.get(row, ())) : self._decoder.cache.capacity])
        self._sure[row] = len(self._fed.get(row, ()))

    def look_up(self, row: int, tokens: Sequence[int], count: int) -> Draft:
        """Nothing: every guess takes a pass."""
        return NO_DRAFT

    def propose(
        self,
        row: int,
        tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        rng: Generator,
    ) -> Draft:
        """Generate guesses; see `Drafter.propose`. Greedy requests get the likeliest tokens."""
        count = min(count, self._decoder.cache.capacity - len(tokens) + 1)
        if count < 1:
            return NO_DRAFT
        logits = self._catch_up(row, tokens)
        if sampling.temperature == 0:
            return self._greedy(row, logits, count)
        if sampling.seed is not None:
            return self._seeded(row, logits, count, sampling, sampling.seed)
        return self._sampled(row, logits, count, sampling, rng)

    def backlog(self, row: int, length: int) -> int:
        """Tokens not fed yet; rejected guesses, which are fed anew, are taken for fed."""
        return max(1, min(length, self._decoder.cache.capacity) - len(self._fed.get(row, ())))

    def release(self, row: int) -> None:
        """Forget a row."""
        self._fed.pop(row, None)
        self._sure.pop(row, None)
        self._decoder.cache.truncate(row, 0)

    def _catch_up(self, row: int, tokens: Sequence[int]) -> Floats:
        """Make the cache hold `tokens`, return the logits [V] after the last."""
        fed = self._fed.setdefault(row, [])
        most = min(len(fed), len(tokens) - 1)  # the last token is fed in any case: for its logits
        same = min(self._sure.get(row, 0), most)
        while same < most and fed[same] == tokens[same]:
            same += 1
        del fed[same:]
        self._decoder.cache.truncate(row, same)
        self._sure[row] = len(tokens)
        return self._feed(row, tokens[same:])

    def _feed(self, row: int, tokens: Sequence[int]) -> Floats:
        """Append tokens to the cache, return the logits [V] after the last."""
        logits: Floats = np.empty((0, 0), np.float32)
        known = [token if token < self._decoder.vocab_size else _UNKNOWN for token in tokens]
        for start in range(0, len(known), self._decoder.max_width):
            chunk = known[start : start + self._decoder.max_width]
            logits = self._decoder.extend(row, chunk, logits=1)
        self._fed.setdefault(row, []).extend(tokens)
        return logits[-1, : self._vocab] if len(tokens) else logits

    def _greedy(self, row: int, logits: Floats, count: int) -> Draft:
        guesses: list[int] = []
        while True:
            guesses.append(int(logits.argmax()))
            if len(guesses) == count or self._unsure(logits):
                return Draft(tuple(guesses))
            logits = self._feed(row, guesses[-1:])

    def _sampled(
        self, row: int, logits: Floats, count: int, sampling: SamplingParams, rng: Generator
    ) -> Draft:
        guesses: list[int] = []
        # In the target's vocabulary: ids that the draft does not know have probability 0.
        probs: Floats = np.zeros((count, self._target_vocab), np.float32)
        while True:
            known = filtered_probs(logits[None], sampling)[0]
            probs[len(guesses), : self._vocab] = known
            guesses.append(draw(known, rng))
            if len(guesses) == count or known[guesses[-1]] < self._min_probability:
                return Draft(tuple(guesses), probs[: len(guesses)])
            logits = self._feed(row, guesses[-1:])

    def _seeded(
        self, row: int, logits: Floats, count: int, sampling: SamplingParams, seed: int
    ) -> Draft:
        """Draw by the target's own noise: like distributions mostly draw the same token."""
        guesses: list[int] = []
        while True:
            known = filtered_probs(logits[None], sampling)[0]
            guesses.append(draw_seeded(known, seed, len(self._fed[row])))
            if len(guesses) == count or known[guesses[-1]] < self._min_probability:
                return Draft(tuple(guesses))
            logits = self._feed(row, guesses[-1:])

    def _unsure(self, logits: Floats) -> bool:
        """Whether the likeliest token of [V] is none that one should build upon."""
        if not self._min_probability:
            return False
        return 1 / float(np.exp(logits - logits.max()).sum()) < self._min_probability
