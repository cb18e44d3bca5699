"""Draft tokens by a smaller model with the same vocabulary and its own KV cache.

Rejected draft tokens stay in its cache until the next call. That call compares the computed tokens
with the current sequence and continues from the first difference, so nothing is computed twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.kvcache.prefix_cache import common_prefix
from specops.runtime.model_runner import ModelRunner
from specops.runtime.sampling import Floats, draw, filtered_probs
from specops.speculation.drafters.base import Draft, DraftContext
from specops.speculation.drafters.guessing import GuessingDrafter

_UNKNOWN = 0  # the draft model reads this token if it has no embedding for the target's
_CATCH_UP = 32  # maximum number of tokens to compute together with the first draft token
_DEPTH = 16  # calibrated guesses in a row; further ones count as the last


@dataclass(slots=True)
class _Slot:
    """The content of the draft model's cache for one sequence."""

    computed: list[int]  # tokens whose keys and values are cached, including draft tokens
    sure: int  # number of them that are known to belong to the sequence
    final: int = 0  # number of the sequence's tokens whose entries are final
    probs: Floats | None = None  # [k, V], the distributions of a draft's tokens


class DraftModelDrafter(GuessingDrafter):
    """Runs the draft model token by token, for all slots at once.

    Args:
        runner: the draft model, with as many slots as the target.
        costs: costs of its passes.
        vocab_size: the target's; the draft model never proposes an id beyond it.
    """

    name = "draft"

    def __init__(self, runner: ModelRunner, costs: CostModel, *, vocab_size: int) -> None:
        self._vocab = min(vocab_size, runner.vocab_size)
        super().__init__(runner, costs, range(self._vocab), _DEPTH)
        self._target_vocab = vocab_size
        self._clients: dict[int, str] = {}
        self._slots: dict[int, _Slot] = {}  # created when first asked

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Note the slot's client. Most resting requests never ask, so their texts can wait."""
        self._clients[slot] = client

    def is_synced(self, slot: int, tokens: Sequence[int]) -> bool:
        """Whether few enough tokens remain to be computed; rejected ones count as computed."""
        length = min(len(tokens), self.runner.cache.context)
        most = min(_CATCH_UP, self.runner.max_tokens)
        return length - len(self._begun_slot(slot, tokens).computed) <= most

    def read(self, slot: int, tokens: Sequence[int], most: int) -> int:
        """Compute missing tokens in one pass, but not the text's last one; see `Drafter.read`."""
        self._begun = time.perf_counter()
        start = self._agree(slot, tokens)
        end = min(start + most, len(tokens) - 1, self.runner.cache.context)
        end = min(end, start + self.runner.max_tokens)
        end = min(end, self.runner.cache.next_snapshot(slot) or end)
        if end <= start or not self.runner.cache.reserve(slot, end):
            return 0
        self._add(batch := Batch(), slot, tokens[start:end])
        self._forward(batch)
        self._agree(slot, tokens)
        return end - start

    def release(self, slot: int) -> None:
        """Free a slot. The prefix cache may keep its sequence's tokens."""
        self._latest.pop(slot, None)
        if self._slots.pop(slot, None) is not None:  # else nobody asked
            self.runner.cache.release(slot)

    # -- one draft ------------------------------------------------------------------------------

    def _first(self, contexts: Sequence[DraftContext]) -> list[DraftContext]:
        going, pending = list[DraftContext](), list[Sequence[int]]()
        for context in contexts:
            self._calibration.begin(context.slot, context.text)
            place = self._agree(context.slot, context.text)
            if room := self._reserve(context):
                going.append(context._replace(max_draft=room))
                pending.append(context.text[place:])
                state = self._slots[context.slot]
                state.probs = None
                if context.sampling.temperature and context.noise is None:
                    # As wide as the target's vocabulary: ids missing here have probability 0.
                    state.probs = np.zeros((room, self._target_vocab), np.float32)
        return self._pass(0, going, pending)

    def _next(
        self, guess: int, contexts: Sequence[DraftContext], rows: Sequence[int]
    ) -> list[DraftContext]:
        last = [self._latest[context.slot].tokens[-1:] for context in contexts]
        return self._pass(guess, contexts, last)

    def _pass(
        self, guess: int, contexts: Sequence[DraftContext], pending: Sequence[Sequence[int]]
    ) -> list[DraftContext]:
        """Compute the next tokens of each request, and guess the one after them.

        Passes are as wide as allowed.

        Args:
            guess: number of guesses so far.
            contexts: the requests.
            pending: the tokens to compute for each.
        """
        batch, members = Batch(), list[DraftContext]()
        for context, tokens in zip(contexts, pending, strict=True):
            if batch.num_tokens + len(tokens) > self.runner.max_tokens:
                self._run(guess, batch, members)
                batch, members = Batch(), []
            self._add(batch, context.slot, tokens, 1)
            members.append(context)
        if members:
            self._run(guess, batch, members)
        return list(contexts)

    def _run(self, guess: int, batch: Batch, members: Sequence[DraftContext]) -> None:
        logits = self._forward(batch)[:, : self._vocab]
        for context, row in zip(members, logits, strict=True):
            self._guess(guess, context, row)

    def _choose(self, guess: int, context: DraftContext, logits: Floats) -> tuple[int, float]:
        """See `GuessingDrafter._choose`. Without noise it keeps each draw's distribution."""
        if (drawn := self._slots[context.slot].probs) is None:
            return super()._choose(guess, context, logits)
        kept = drawn[guess, None, : self._vocab]
        (probs,) = filtered_probs(logits[None], context.sampling, kept)
        return draw(probs, context.rng), float(probs.max())

    def _draft(self, context: DraftContext) -> Draft:
        draft = super()._draft(context)
        draft.probs = self._slots[context.slot].probs
        return draft

    def _reserve(self, context: DraftContext) -> int:
        """Make room in the cache for a draft; returns the number of tokens that fit."""
        cache, length = self.runner.cache, len(context.text)
        count = max(0, min(context.max_draft, cache.context - length + 1))
        while count and not cache.reserve(context.slot, length + count - 1):
            count //= 2
        return count

    def _begun_slot(self, slot: int, tokens: Sequence[int]) -> _Slot:
        """A slot. When new, it starts with the prefix cached from the client's earlier texts."""
        if (state := self._slots.get(slot)) is None:
            held = self.runner.cache.allocate(slot, self._known(tokens), self._clients[slot])
            state = self._slots[slot] = _Slot(list(tokens[:held]), held)
        return state

    def _agree(self, slot: int, tokens: Sequence[int]) -> int:
        """Forget computed tokens that differ from the sequence; returns how many remain.

        The sequence's last token never remains: it is computed again for its logits.
        """
        state = self._begun_slot(slot, tokens)
        computed, most = state.computed, min(len(state.computed), len(tokens) - 1)
        state.final = len(tokens) - 1
        same = min(state.sure, most)
        same += common_prefix(computed[same:most], tokens[same:most])
        del computed[same:]
        state.sure = same
        self.runner.cache.commit(slot, self._known(computed), same)
        return same

    def _add(self, batch: Batch, slot: int, tokens: Sequence[int], num_logits: int = 0) -> None:
        state, known = self._slots[slot], self._known(tokens)
        start = len(state.computed)
        batch.add(slot, start, known, num_logits, min(state.final, start + len(known)))
        state.computed.extend(tokens)

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens as the draft model reads them: without ids beyond its vocabulary."""
        size = self.runner.vocab_size
        if size >= self._target_vocab:
            return tokens
        return [token if token < size else _UNKNOWN for token in tokens]
