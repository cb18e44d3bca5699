"""Draft tokens by an EAGLE-3 head: one layer that reads hidden states of the target's layers.

The head's entry at position i joins the target's states at i with the token at i + 1, and guesses
the token at i + 2. Its keys and values are in a separate KV cache, which counts and shares blocks
like the target's: an entry depends only on the tokens up to i + 1. As the target computes tokens,
their states queue here. One pass over all slots reads all waiting states and makes the first
guesses. After that the head's own state replaces the target's, and each further guess takes one
more pass. The tokens that really follow overwrite those entries.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.model_runner import AuxHiddenStates, Fusion, ModelRunner
from specops.runtime.sampling import Floats
from specops.speculation.drafters.base import DraftContext
from specops.speculation.drafters.guessing import GuessingDrafter

MAX_WAITING = 64  # states per slot; when full, they are read even if nobody asks
_TOKEN_BITS = 32


@dataclass(slots=True)
class _Slot:
    """The head's part of one sequence.

    Attributes:
        tokens: the sequence's known tokens; the engine appends to the list.
        waiting: [MAX_WAITING, size], unread states of the positions after the entries.
        first: position of the head's first entry: the target may have taken earlier tokens from
            its cache, without their states.
        entries: number of final entries.
        num_waiting: number of unread states.
    """

    tokens: Sequence[int]
    waiting: Floats
    first: int = 0
    entries: int = 0
    num_waiting: int = 0

    @property
    def end(self) -> int:
        """The position after the last one with a known state."""
        return self.first + self.entries + self.num_waiting


class EagleDrafter(GuessingDrafter):
    """Guesses one token after the other, as long as the next guess seems to pay.

    Args:
        runner: the head, with as many slots as the target.
        fusion: joins the states of several layers; None: the head reads one layer.
        states: delivers the target's hidden states.
        tokens: the tokens that the head can guess, in the order of its logits.
        depth: maximum number of guesses in a row.
        costs: costs of the head's passes, including the fusion and the argmax.
    """

    name = "head"
    draws = True
    follows = True

    def __init__(
        self,
        runner: ModelRunner,
        fusion: Fusion | None,
        states: AuxHiddenStates,
        *,
        tokens: Sequence[int],
        depth: int,
        costs: CostModel,
    ) -> None:
        super().__init__(runner, costs, tokens, depth)
        self._fusion = fusion
        self._states = states
        self._slots: dict[int, _Slot] = {}
        self._reading = 0.0
        states.receive = self._receive

    def read_seconds(self, slot: int) -> float:
        """Seconds to read the state of one token of a prompt."""
        if slot not in self._slots:
            return 0.0
        return self.costs.cost(MAX_WAITING, logits=0) / MAX_WAITING

    def take_reading(self) -> float:
        """Predicted seconds of the passes without a guess since the last call."""
        seconds, self._reading = self._reading, 0.0
        return seconds

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Start a slot with the entries cached from earlier requests; see `Drafter.begin`."""
        held = self.runner.cache.allocate(slot, _keys(tokens), client)
        waiting: Floats = np.empty((MAX_WAITING, self._states.size), np.float32)
        self._slots[slot] = _Slot(tokens, waiting, entries=held)
        self._states.followed.add(slot)

    def required_prefix(self, slot: int, tokens: Sequence[int]) -> int | None:
        """The number of leading tokens whose states it has; see `Drafter.required_prefix`."""
        own, cache = self._slots.get(slot), self.runner.cache
        if own is None:  # there was no room for it
            return None
        if not (own.first or own.num_waiting):
            for ahead, other in list(self._slots.items()):
                common = other.num_waiting > 1 and cache.shares_prefix(
                    ahead, slot, other.entries + 1
                )
                if common:  # otherwise its unread states would have to be computed again
                    self._read([ahead], leave=1)
                    if ahead in self._slots:  # there was room
                        cache.take_snapshot(ahead)
            own.entries = cache.match_prefix(slot, _keys(tokens))
        return None if own.first else own.end

    def release(self, slot: int) -> None:
        """Forget the slot's sequence. The prefix cache may keep its entries."""
        own = self._slots.get(slot)
        try:
            if (
                own is not None
                and not own.first
                and self.runner.cache.reuse is not PrefixSharing.OFF
            ):
                self._read([slot], leave=0)  # a request that continues this text starts after them
        finally:
            self._let_go(slot)

    def stop(self) -> None:
        """Tell the target to stop delivering states."""
        self._states.followed.clear()

    def is_synced(self, slot: int, tokens: Sequence[int]) -> bool:
        """Whether it has the states of exactly all tokens but the last."""
        own = self._slots.get(slot)
        return own is not None and own.num_waiting > 0 and own.end + 1 == len(tokens)

    def agreement(self, tokens: Sequence[int], states: Floats, likeliest: Sequence[int]) -> float:
        """The share of positions at which the head guesses the target's most likely token.

        Args:
            tokens: [n], the text, at least two tokens.
            states: [n, size], the target's.
            likeliest: [n], the target's most likely token after each token.
        """
        cache, batch = self.runner.cache, Batch()
        cache.allocate(0, tokens[1:], share=False)
        cache.reserve(0, len(tokens) - 1)
        batch.add(0, 0, tokens[1:], len(tokens) - 1)
        guessed = [self._tokens[row] for row in self._join(batch, [states[:-1]]).argmax(-1)]
        cache.release(0)
        return float(np.equal(guessed, likeliest[1:]).mean())

    # -- the target's states -----------------------------------------------------------------------

    def _receive(self, slot: int, start: int, rows: Floats) -> None:
        """Take states of final tokens.

        Args:
            slot: the sequence's slot.
            start: position of the first state.
            rows: [n, size], the states.
        """
        own = self._slots.get(slot)
        if own is None:
            return
        if start > own.end:  # the states in between stay unknown: start over after them
            self.runner.cache.release(slot)
            self.runner.cache.allocate(slot, (), share=False)
            own.first, own.entries, own.num_waiting = start, 0, 0
        rows = rows[own.end - start :]
        while len(rows) and slot in self._slots:
            room = MAX_WAITING - own.num_waiting
            more, rows = rows[:room], rows[room:]
            own.waiting[own.num_waiting : own.num_waiting + len(more)] = more
            own.num_waiting += len(more)
            if own.num_waiting == MAX_WAITING:
                self._read([slot], leave=1)  # keep the last one for the next guess

    def _let_go(self, slot: int) -> None:
        self._latest.pop(slot, None)
        if self._slots.pop(slot, None) is not None:
            self.runner.cache.release(slot)
            self._states.followed.discard(slot)

    def _read(
        self,
        slots: Sequence[int],
        *,
        leave: int,
        guesses: Mapping[int, DraftContext] | None = None,
    ) -> list[int]:
        """Read the waiting states in one pass, as far as the tokens after them are known.

        Args:
            slots: the slots.
            leave: number of states at the end to leave unread.
            guesses: the slots' requests, to guess after the last entry of each; all tokens must be
                known. None: only read.

        Returns:
            The slots in the pass, in its order. The others have nothing to read, or no room.
        """
        batch, members, rows = Batch(), list[int](), list[Floats]()
        for slot in slots:
            own = self._slots[slot]
            place = own.first + own.entries + 1  # of the first entry's token
            tokens = own.tokens[place : place + own.num_waiting - leave]
            length = own.entries + len(tokens)
            if not tokens:
                continue
            if length > self.runner.cache.context or not self.runner.cache.reserve(slot, length):
                self._let_go(slot)
                continue
            batch.add(slot, own.entries, tokens, int(guesses is not None))
            rows.append(own.waiting[: len(tokens)])
            members.append(slot)
        if members:
            logits = self._join(batch, rows)
            if guesses is None:
                count, work = batch.num_tokens, batch.attention_work
                self._reading += self.costs.cost(count, work, logits=batch.num_logits)
            else:
                for slot, row in zip(members, logits, strict=True):
                    self._guess(0, guesses[slot], row)
        for slot, read in zip(members, rows, strict=True):
            own = self._slots[slot]
            left = own.num_waiting - len(read)
            own.waiting[:left] = own.waiting[len(read) : own.num_waiting]
            own.num_waiting, own.entries = left, own.entries + len(read)
            keys = own.tokens[own.first + 1 :] if own.first else _keys(own.tokens)
            self.runner.cache.commit(slot, keys, own.entries)
        return members

    # -- guesses -----------------------------------------------------------------------------------

    def _first(self, contexts: Sequence[DraftContext]) -> list[DraftContext]:
        asking = {context.slot: context for context in contexts}
        for context in contexts:
            self._calibration.begin(context.slot, context.text)
        return [asking[slot] for slot in self._read(list(asking), leave=0, guesses=asking)]

    def _next(
        self, guess: int, contexts: Sequence[DraftContext], rows: Sequence[int]
    ) -> list[DraftContext]:
        """Compute the entry of each request's latest guess, from the head's state before it."""
        batch, kept, going = Batch(), list[int](), list[DraftContext]()
        for context, row in zip(contexts, rows, strict=True):
            place = self._slots[context.slot].entries + guess - 1
            length = place + 1
            if length <= self.runner.cache.context and self.runner.cache.reserve(
                context.slot, length
            ):
                batch.add(context.slot, place, self._latest[context.slot].tokens[-1:], 1)
                going.append(context)
                kept.append(row)
        given, made = self.runner.given_states, self.runner.next_states
        if not kept or given is None or made is None:
            return []
        given[: len(kept)] = made[kept]
        for context, logits in zip(going, self._forward(batch), strict=True):
            self._guess(guess, context, logits)
        return going

    def _join(self, batch: Batch, states: Sequence[Floats]) -> Floats:
        """Run a pass over the target's states."""
        self._begun = time.perf_counter()
        given = self.runner.given_states if self._fusion is None else self._fusion.states
        if given is not None:
            np.concatenate(states, out=given[: batch.num_tokens])
        if self._fusion is not None:
            self._fusion.run(batch.num_tokens)
        return self._forward(batch)


def _keys(tokens: Sequence[int]) -> list[int]:
    """The entries' keys in the prefix cache: their tokens, the first one with its predecessor."""
    return [tokens[0] << _TOKEN_BITS | tokens[1], *tokens[2:]] if len(tokens) > 1 else []
