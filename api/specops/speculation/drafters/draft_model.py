"""Draft tokens by a smaller model of the same vocabulary, with a KV cache of its own.

Rejected draft tokens stay in its cache until the next call. That call compares the computed tokens
with what the sequence has become and goes on from the first difference, so nothing is computed
twice. All slots share a pass per draft token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import ModelRunner
from specops.runtime.sampling import Floats, draw, draw_seeded, filtered_probs
from specops.speculation.drafters.base import LEAST_REACH, NO_DRAFT, Draft, DraftRequest

_UNKNOWN = 0  # the draft model reads this token where it has no embedding for the target's


@dataclass(slots=True)
class _Slot:
    """The content of the draft model's cache for one sequence."""

    computed: list[int]  # tokens whose keys and values are in the cache, draft tokens included
    sure: int  # number of them that are known to be the sequence's own


@dataclass(slots=True)
class _Growing:
    """A draft in the making."""

    request: DraftRequest
    count: int  # draft tokens that the cache has room for
    pending: Sequence[int]  # tokens to compute next
    place: int  # position of the first of them
    tokens: list[int] = field(default_factory=list)
    probs: list[Floats] = field(default_factory=list)  # each [V], of draws without a seed


class DraftModelDrafter:
    """Runs the draft model token by token, for all slots at once.

    Args:
        runner: the draft model, with as many slots as the target has.
        vocab_size: the target's; the draft model never proposes an id beyond it.
        costs: the cost model of its passes, which learns from each; None where it is not needed.
    """

    name = "draft"
    runs_model = True

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        costs: CostModel | None = None,
    ) -> None:
        self.runner = runner
        self._costs = costs
        self._vocab = min(vocab_size, runner.vocab_size)
        self._target_vocab = vocab_size
        self._slots: dict[int, _Slot] = {}
        self._begun = 0.0  # when work on the next pass began

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Begin a slot with what the client's earlier prompts left of this one's beginning."""
        held = self.runner.cache.begin(slot, self._known(tokens), client)
        self._slots[slot] = _Slot(list(tokens[:held]), held)

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, least: float = LEAST_REACH
    ) -> Draft:
        """Nothing: every draft token takes a pass."""
        return NO_DRAFT

    def backlog(self, slot: int, length: int) -> int:
        """Tokens that are not computed yet. Rejected tokens, to be replaced, count as computed."""
        return max(1, min(length, self.runner.cache.context) - len(self._slots[slot].computed))

    def prefill(self, slot: int, tokens: Sequence[int], most: int) -> int:
        """Compute a piece of the backlog in one pass, all but the sequence's last token."""
        self._begun = time.perf_counter()
        start = self._agree(slot, tokens)
        end = min(start + most, len(tokens) - 1, self.runner.cache.context)
        end = min(end, start + self.runner.max_tokens)
        if end <= start or not self.runner.cache.reserve(slot, end):
            return 0
        batch = Batch()
        batch.add(slot, start, self._known(tokens[start:end]))
        self._pass(batch)
        self._slots[slot].computed.extend(tokens[start:end])
        self._agree(slot, tokens)
        return end - start

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draw draft tokens; see `Drafter.propose`. Greedy requests get the likeliest ones."""
        self._begun = time.perf_counter()
        found = [self._start(request) for request in requests]
        growing = [item for item in found if item is not None]
        while growing:
            for item, logits in zip(growing, self._forward(growing), strict=True):
                self._draw(item, logits)
            growing = [item for item in growing if len(item.tokens) < item.count]
        return [NO_DRAFT if item is None else self._draft(item) for item in found]

    def release(self, slot: int) -> None:
        """Free a slot. The prefix cache may keep its sequence's tokens."""
        if self._slots.pop(slot, None) is not None:
            self.runner.cache.release(slot)

    # -- one draft ------------------------------------------------------------------------------

    def _start(self, request: DraftRequest) -> _Growing | None:
        """Roll back to what the sequence has become; None where the cache has no room for it."""
        cache, tokens = self.runner.cache, request.tokens
        count = min(request.count, cache.context - len(tokens) + 1)
        if count < 1:
            return None
        place = self._agree(request.slot, tokens)
        while not cache.reserve(request.slot, len(tokens) + count - 1):
            count //= 2
            if not count:
                return None
        return _Growing(request, count, tokens[place:], place)

    def _agree(self, slot: int, tokens: Sequence[int]) -> int:
        """Forget the computed tokens that the sequence does not have; returns how many stay.

        The sequence's last token never stays: it is computed again for its logits.
        """
        state = self._slots[slot]
        computed, most = state.computed, min(len(state.computed), len(tokens) - 1)
        same = min(state.sure, most)
        while same < most and computed[same] == tokens[same]:
            same += 1
        del computed[same:]
        state.sure = same
        self.runner.cache.commit(slot, self._known(computed), same)
        return same

    def _forward(self, growing: Sequence[_Growing]) -> list[Floats]:
        """Compute the pending tokens of each draft, in passes as wide as they may be.

        Returns:
            for each draft, the logits [V] after its last token.
        """
        found: list[Floats] = []
        room = self.runner.max_tokens
        batch, members = Batch(), list[_Growing]()
        for item in growing:
            slot = item.request.slot
            while len(item.pending) > room:  # a long backlog takes passes of its own
                alone = Batch()
                alone.add(slot, item.place, self._known(item.pending[:room]))
                self._pass(alone)
                self._slots[slot].computed.extend(item.pending[:room])
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
            self._slots[item.request.slot].computed.extend(item.pending)
            item.place += len(item.pending)
        # Each pass writes over the logits of the one before.
        return [logits[index].copy() for index in range(len(members))]

    def _pass(self, batch: Batch) -> Floats:
        """Run a pass. Its cost is the time since the last one: tokens have to be drawn, too."""
        logits = self.runner.forward(batch)
        now = time.perf_counter()
        if self._costs is not None:
            self._costs.observe(batch.num_tokens, batch.attention_work, now - self._begun)
        self._begun = now
        return logits

    def _draw(self, item: _Growing, logits: Floats) -> None:
        """Choose a draft token from [V] logits."""
        sampling = item.request.sampling
        if sampling.temperature == 0:
            token = int(logits.argmax())
        else:
            known = filtered_probs(logits[None], sampling)[0]
            if sampling.seed is not None:
                # The target's own noise: similar distributions mostly draw the same token.
                token = draw_seeded(known, sampling.seed, item.place)
            else:
                token = draw(known, item.request.rng)
                item.probs.append(known)
        item.tokens.append(token)
        item.pending = [token]

    def _draft(self, item: _Growing) -> Draft:
        if not item.probs:
            return Draft(tuple(item.tokens))
        # In the target's vocabulary: ids that the draft model does not know have probability 0.
        probs: Floats = np.zeros((len(item.tokens), self._target_vocab), np.float32)
        probs[:, : self._vocab] = item.probs
        return Draft(tuple(item.tokens), probs)

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens as the draft model takes them."""
        size = self.runner.vocab_size
        if size >= self._target_vocab:
            return tokens
        return [token if token < size else _UNKNOWN for token in tokens]
