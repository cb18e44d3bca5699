"""Draft tokens by a smaller model of the same vocabulary, with a KV cache of its own.

Rejected draft tokens stay in its cache until the next call. That call compares the computed tokens
with what the sequence has become and goes on from the first difference, so nothing is computed
twice. All slots share a pass per draft token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import ModelRunner
from specops.runtime.sampling import Floats, draw, draw_seeded, filtered_probs
from specops.speculation.drafters.base import NO_DRAFT, Draft, DraftRequest

_UNKNOWN = 0  # the draft model reads this token where it has no embedding for the target's


@dataclass(slots=True)
class _Slot:
    """The content of the draft model's cache for one sequence."""

    computed: list[int]  # tokens whose keys and values are in the cache, draft tokens included
    sure: int  # number of them that are known to be the sequence's own
    final: int = 0  # number of the sequence's tokens whose computation stays


class DraftModelDrafter:
    """Runs the draft model token by token, for all slots at once.

    Args:
        runner: the draft model, with as many slots as the target has.
        vocab_size: the target's; the draft model never proposes an id beyond it.
        costs: the cost model of its passes, which learns from each; None where it is not needed.
    """

    name = "draft"

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
        held = self.runner.cache.allocate(slot, self._known(tokens), client)
        self._slots[slot] = _Slot(list(tokens[:held]), held)

    def num_uncomputed(self, slot: int, length: int) -> int:
        """Tokens that are not computed yet. Rejected tokens, to be replaced, count as computed."""
        return max(1, min(length, self.runner.cache.context) - len(self._slots[slot].computed))

    def prefill(self, slot: int, tokens: Sequence[int], max_tokens: int) -> int:
        """Compute uncomputed tokens in one pass, all but the text's last one."""
        self._begun = time.perf_counter()
        start = self._agree(slot, tokens)
        end = min(start + max_tokens, len(tokens) - 1, self.runner.cache.context)
        end = min(end, start + self.runner.max_tokens)
        end = min(end, self.runner.cache.next_snapshot(slot) or end)
        if end <= start or not self.runner.cache.reserve(slot, end):
            return 0
        self._add(batch := Batch(), slot, tokens[start:end])
        self._run(batch, [(slot, tokens[start:end])])
        self._agree(slot, tokens)
        return end - start

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Draw draft tokens; see `DraftModel.propose`. Greedy requests get the likeliest ones."""
        self._begun = time.perf_counter()
        drafts = [NO_DRAFT] * len(requests)
        lengths: dict[int, int] = {}  # by request, as far as there is room
        pending: dict[int, Sequence[int]] = {}  # by request, tokens to compute next
        for index, request in enumerate(requests):
            place = self._agree(request.slot, request.text)
            if length := self._reserve(request):
                drafts[index], lengths[index] = Draft(), length
                pending[index] = request.text[place:]
                if request.sampling.temperature and request.noise is None:
                    # The target's vocabulary: ids that the draft model lacks have probability 0.
                    drafts[index].probs = np.zeros((length, self._target_vocab), np.float32)
        while pending:
            slots = [requests[index].slot for index in pending]
            found = self._forward(slots, [*pending.values()])
            for index, logits in zip([*pending], found, strict=True):
                token = self._draw(requests[index], drafts[index], logits)
                drafts[index].tokens += (token,)
                pending[index] = (token,)
                if len(drafts[index].tokens) == lengths[index]:
                    del pending[index]
        return drafts

    def release(self, slot: int) -> None:
        """Free a slot. The prefix cache may keep its sequence's tokens."""
        if self._slots.pop(slot, None) is not None:
            self.runner.cache.release(slot)

    # -- one draft ------------------------------------------------------------------------------

    def _reserve(self, request: DraftRequest) -> int:
        """Make room in the cache for a draft; returns the number of its tokens, 0 without room."""
        cache, length = self.runner.cache, len(request.text)
        count = max(0, min(request.max_draft, cache.context - length + 1))
        while count and not cache.reserve(request.slot, length + count - 1):
            count //= 2
        return count

    def _agree(self, slot: int, tokens: Sequence[int]) -> int:
        """Forget the computed tokens that the sequence does not have; returns how many stay.

        The sequence's last token never stays: it is computed again for its logits.
        """
        state = self._slots[slot]
        computed, most = state.computed, min(len(state.computed), len(tokens) - 1)
        state.final = len(tokens) - 1
        same = min(state.sure, most)
        while same < most and computed[same] == tokens[same]:
            same += 1
        del computed[same:]
        state.sure = same
        self.runner.cache.commit(slot, self._known(computed), same)
        return same

    def _forward(self, slots: Sequence[int], pending: Sequence[Sequence[int]]) -> Iterator[Floats]:
        """Compute the next tokens of each slot, in passes as wide as they may be.

        Yields:
            For each slot, the logits [V] after its last token, valid until the next are asked for.
        """
        room = self.runner.max_tokens
        batch, members = Batch(), list[tuple[int, Sequence[int]]]()
        for slot, missing in zip(slots, pending, strict=True):
            tokens = missing
            while len(tokens) > room:  # a long text takes passes of its own
                cache, computed = self.runner.cache, self._slots[slot].computed
                place = len(computed)
                count = min(room, (cache.next_snapshot(slot) or place + room) - place)
                self._add(alone := Batch(), slot, tokens[:count])
                self._run(alone, [(slot, tokens[:count])])
                cache.commit(slot, self._known(computed), len(computed))
                tokens = tokens[count:]
            if batch.num_tokens + len(tokens) > room:
                yield from self._run(batch, members)
                batch, members = Batch(), []
            self._add(batch, slot, tokens, 1)
            members.append((slot, tokens))
        yield from self._run(batch, members)

    def _add(self, batch: Batch, slot: int, tokens: Sequence[int], num_logits: int = 0) -> None:
        state, known = self._slots[slot], self._known(tokens)
        start = len(state.computed)
        batch.add(slot, start, known, num_logits, min(state.final, start + len(known)))

    def _run(self, batch: Batch, members: Sequence[tuple[int, Sequence[int]]]) -> Floats:
        logits = self._pass(batch)[:, : self._vocab]
        for slot, tokens in members:
            self._slots[slot].computed.extend(tokens)
        return logits

    def _pass(self, batch: Batch) -> Floats:
        """Run a pass. Its cost is the time since the last one: tokens have to be drawn, too."""
        logits = self.runner.forward(batch)
        now = time.perf_counter()
        if self._costs is not None:
            work, spans = batch.attention_work, len(batch.spans)
            self._costs.observe(batch.num_tokens, work, now - self._begun, spans)
        self._begun = now
        return logits

    def _draw(self, request: DraftRequest, draft: Draft, logits: Floats) -> int:
        """Choose a draft's next token from [V] logits."""
        sampling, position = request.sampling, len(draft.tokens)
        if sampling.temperature == 0:
            return int(logits.argmax())
        kept = None if draft.probs is None else draft.probs[position, None, : self._vocab]
        (probs,) = filtered_probs(logits[None], sampling, kept)
        if request.noise is None:
            return draw(probs, request.rng)
        # The target's own noise: similar distributions mostly draw the same token.
        return draw_seeded(probs, request.noise, len(request.text) + position)

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens as the draft model takes them."""
        size = self.runner.vocab_size
        if size >= self._target_vocab:
            return tokens
        return [token if token < size else _UNKNOWN for token in tokens]
