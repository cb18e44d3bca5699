"""Draft tokens by a smaller model of the same vocabulary, with a KV cache of its own.

Rejected draft tokens stay in its cache until the next call, which compares what was computed with
what became of the sequence and goes on from the first difference: nothing is computed twice. All
slots share a pass per draft token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import ModelRunner
from specops.runtime.sampling import Floats, draw, draw_seeded, filtered_probs
from specops.speculation.drafters.base import LEAST_REACH, NO_DRAFT, Draft, DraftRequest

_UNKNOWN = 0  # stands for the target's tokens that the draft has no embedding for


class _Slot:
    """What the draft's cache holds of one sequence.

    Attributes:
        computed: the tokens whose keys and values are in the cache, draft tokens included.
        sure: how many of them are the sequence's own.
    """

    __slots__ = ("computed", "sure")

    def __init__(self, computed: list[int]) -> None:
        self.computed = computed
        self.sure = len(computed)


class _Growing:
    """A draft in the making: its request, what is fed next, and what has been drawn."""

    __slots__ = ("done", "pending", "place", "probs", "request", "tokens")

    def __init__(self, request: DraftRequest, pending: Sequence[int], place: int) -> None:
        self.request = request
        self.pending = pending  # tokens to be computed next
        self.place = place  # position of the first of them
        self.tokens: list[int] = []
        self.probs: list[Floats] = []  # each [V], of draws without a seed
        self.done = False


class DraftModelDrafter:
    """Runs the draft model token by token, for all slots at once.

    Args:
        runner: the draft model, with as many slots as the target has.
        vocab_size: the target's; the draft never proposes an id beyond it.
        costs: of the draft model's passes, which tell it what they take; None: not needed.
        min_probability: the first draft token that the draft itself gives less than this, after
            the request's own filters, is the last. It is still offered: its pass is paid for, and
            tokens that were kept or left out by what was drawn would not be distributed as they
            claim.
    """

    name = "draft"
    runs_model = True

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        costs: CostModel | None = None,
        min_probability: float = 0.0,
    ) -> None:
        self.runner = runner
        self._costs = costs
        self._vocab = min(vocab_size, runner.vocab_size)
        self._target_vocab = vocab_size
        self._min_probability = min_probability
        self._slots: dict[int, _Slot] = {}

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Take over what the client's earlier prompts have left of this one's beginning."""
        held = self.runner.cache.begin(slot, self._known(tokens), client)
        self._slots[slot] = _Slot(list(tokens[:held]))

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, least: float = LEAST_REACH
    ) -> Draft:
        """Nothing: every draft token takes a pass."""
        return NO_DRAFT

    def backlog(self, slot: int, length: int) -> int:
        """Tokens not computed yet; rejected ones, which are computed anew, count as computed."""
        return max(1, min(length, self.runner.cache.context) - len(self._slots[slot].computed))

    def take_in(self, slot: int, tokens: Sequence[int], most: int) -> int:
        """Compute a piece of the backlog in one pass, all but the sequence's last token."""
        start = self._agree(slot, tokens)
        end = min(start + most, len(tokens) - 1, self.runner.cache.context)
        end = min(end, start + self.runner.max_tokens)
        if end <= start or not self.runner.cache.reserve(slot, end):
            return 0
        batch = Batch()
        batch.add(slot, start, self._known(tokens[start:end]))
        self._pass(batch)
        self._computed(slot, tokens[start:end])
        self._agree(slot, tokens)
        return end - start

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draw draft tokens; see `Drafter.propose`. Greedy requests get the likeliest ones."""
        found = [self._start(request) for request in requests]
        growing = [item for item in found if item is not None]
        while growing:
            for item, logits in zip(growing, self._forward(growing), strict=True):
                self._draw(item, logits)
            growing = [item for item in growing if not item.done]
        return [NO_DRAFT if item is None else self._draft(item) for item in found]

    def release(self, slot: int) -> None:
        """Let go of a slot; its sequence's tokens are kept as the prefix cache may keep them."""
        if self._slots.pop(slot, None) is not None:
            self.runner.cache.release(slot)

    # -- one draft ------------------------------------------------------------------------------

    def _start(self, request: DraftRequest) -> _Growing | None:
        """Roll back to what the sequence became; None where the cache has no room for it."""
        cache, tokens = self.runner.cache, request.tokens
        count = min(request.count, cache.context - len(tokens) + 1)
        if count < 1:
            return None
        place = self._agree(request.slot, tokens)
        while not cache.reserve(request.slot, len(tokens) + count - 1):
            count //= 2
            if not count:
                return None
        if count < request.count:
            request = DraftRequest(request.slot, tokens, count, request.sampling, request.rng)
        return _Growing(request, tokens[place:], place)

    def _agree(self, slot: int, tokens: Sequence[int]) -> int:
        """Forget what the sequence did not become; returns how many tokens stay, never all."""
        state = self._slots[slot]
        computed, same = state.computed, state.sure
        most = min(len(computed), len(tokens) - 1)  # the last is fed in any case: for its logits
        same = min(same, most)
        while same < most and computed[same] == tokens[same]:
            same += 1
        del computed[same:]
        state.sure = same
        self.runner.cache.commit(slot, self._known(computed), same)
        return same

    def _forward(self, growing: Sequence[_Growing]) -> list[Floats]:
        """Compute what is pending of each, in passes as wide as they may be.

        Returns:
            [V] logits after each one's last token.
        """
        found: list[Floats] = []
        room = self.runner.max_tokens
        batch, members = Batch(), list[_Growing]()
        for item in growing:
            slot = item.request.slot
            # A long backlog takes passes of its own, but for its end.
            while len(item.pending) > room:
                alone = Batch()
                alone.add(slot, item.place, self._known(item.pending[:room]))
                self._pass(alone)
                self._computed(slot, item.pending[:room])
                item.pending, item.place = item.pending[room:], item.place + room
            if batch.num_tokens + len(item.pending) > room:
                found += self._run(batch, members)
                batch, members = Batch(), []
            batch.add(slot, item.place, self._known(item.pending), 1)
            members.append(item)
        return found + self._run(batch, members)

    def _run(self, batch: Batch, members: list[_Growing]) -> list[Floats]:
        logits = self._pass(batch)[:, : self._vocab]
        for item in members:
            self._computed(item.request.slot, item.pending)
            item.place += len(item.pending)
        # The next pass writes over them; one pass is the rule, and needs no copy.
        return [logits[index].copy() for index in range(len(members))]

    def _pass(self, batch: Batch) -> Floats:
        start = time.perf_counter()
        logits = self.runner.forward(batch)
        if self._costs is not None:
            seconds = time.perf_counter() - start
            self._costs.observe(batch.num_tokens, batch.attention_work, seconds)
        return logits

    def _draw(self, item: _Growing, logits: Floats) -> None:
        """Choose a draft token from [V] logits."""
        sampling = item.request.sampling
        if sampling.temperature == 0:
            token = int(logits.argmax())
            unsure = self._unsure(logits)
        else:
            known = filtered_probs(logits[None], sampling)[0]
            if sampling.seed is not None:
                # The target's own noise: like distributions mostly draw the same token.
                token = draw_seeded(known, sampling.seed, item.place)
            else:
                token = draw(known, item.request.rng)
                item.probs.append(known)
            unsure = bool(known[token] < self._min_probability)
        item.tokens.append(token)
        item.pending = [token]
        item.done = unsure or len(item.tokens) == item.request.count

    def _draft(self, item: _Growing) -> Draft:
        if not item.probs:
            return Draft(tuple(item.tokens))
        # In the target's vocabulary: ids that the draft does not know have probability 0.
        probs: Floats = np.zeros((len(item.tokens), self._target_vocab), np.float32)
        probs[:, : self._vocab] = item.probs
        return Draft(tuple(item.tokens), probs)

    def _computed(self, slot: int, tokens: Sequence[int]) -> None:
        self._slots[slot].computed.extend(tokens)

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens as the draft model takes them."""
        size = self.runner.vocab_size
        if size >= self._target_vocab:
            return tokens
        return [token if token < size else _UNKNOWN for token in tokens]

    def _unsure(self, logits: Floats) -> bool:
        """Whether the likeliest token of [V] is none that one should build upon."""
        if not self._min_probability:
            return False
        return 1 / float(np.exp(logits - logits.max()).sum()) < self._min_probability
