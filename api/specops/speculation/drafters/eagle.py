"""Draft tokens by an EAGLE-3 head: one layer that reads hidden states of the target's layers.

The head's entry at position i joins the target's states at i with the token at i + 1, and guesses
the token at i + 2. Its keys and values have a separate KV cache, which counts and shares blocks as
the target's does: an entry depends on the tokens up to i + 1 alone. As the target computes tokens,
their states are handed over and wait here; one pass reads all waiting states and makes the first
guess, of all slots. From there on the head's own state takes the place of the target's, and each
further guess is one more pass. The tokens that really follow overwrite those entries.
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

MAX_WAITING = 64  # states of a slot; with this many they are read, asked or not
_TOKEN_BITS = 32


@dataclass(slots=True)
class _Slot:
    """What the head has of one sequence.

    Attributes:
        tokens: the sequence's, as far as they are known; the list grows outside.
        waiting: [MAX_WAITING, size], states of the positions behind the entries, which the head
            has not read.
        first: position of the head's first entry: the target may have taken those before from its
            cache, without their states.
        entries: number of final entries.
        num_waiting: number of states that wait.
    """

    tokens: Sequence[int]
    waiting: Floats
    first: int = 0
    entries: int = 0
    num_waiting: int = 0

    @property
    def end(self) -> int:
        """The position after those whose states are here."""
        return self.first + self.entries + self.num_waiting


class EagleDrafter(GuessingDrafter):
    """Guesses one token after the other, as long as the next guess seems to pay.

    Args:
        runner: the head, with as many slots as the target has.
        fusion: joins the states of several layers; None: there is one.
        states: hands over what the target's layers read.
        tokens: the tokens that the head can guess, in the order of its logits.
        depth: largest number of guesses in a row.
        calibration: factor and summand for the logit of each guess in a row, see `EagleFolder`.
        costs: of the head's passes, with what joins states and finds the likeliest token.
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
        calibration: Sequence[tuple[float, float]] = (),
        costs: CostModel,
    ) -> None:
        super().__init__(runner, costs, tokens, depth, calibration)
        self._fusion = fusion
        self._states = states
        self._slots: dict[int, _Slot] = {}
        self._reading = 0.0
        states.receive = self._receive

    def read_seconds(self, slot: int) -> float:
        """Seconds that it takes to read the state of a prompt's token."""
        return self.costs.cost(MAX_WAITING) / MAX_WAITING if slot in self._slots else 0.0

    def take_reading(self) -> float:
        """Seconds of the passes that made no guess, by their costs."""
        seconds, self._reading = self._reading, 0.0
        return seconds

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Begin a slot with the entries that earlier requests left for it."""
        held = self.runner.cache.allocate(slot, _keys(tokens), client)
        waiting: Floats = np.empty((MAX_WAITING, self._states.size), np.float32)
        self._slots[slot] = _Slot(tokens, waiting, entries=held)
        self._states.followed.add(slot)

    def required_prefix(self, slot: int, tokens: Sequence[int]) -> int | None:
        """The number of tokens whose states it does not need; see `Drafter.required_prefix`."""
        own, cache = self._slots.get(slot), self.runner.cache
        if own is None:  # there was no room for it
            return None
        if not (own.first or own.num_waiting):
            for ahead, other in list(self._slots.items()):
                common = other.num_waiting > 1 and cache.shares_prefix(
                    ahead, slot, other.entries + 1
                )
                if common:  # what it has not read yet would have to be computed again
                    self._read([ahead], leave=1)
                    if ahead in self._slots:  # it had room for that
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
                self._read([slot], leave=0)  # a request that goes on from here begins behind them
        finally:
            self._let_go(slot)

    def stop(self) -> None:
        """The target need not compute states any more."""
        self._states.followed.clear()

    def is_synced(self, slot: int, tokens: Sequence[int]) -> bool:
        """Whether it has the states of all tokens but the last; not of tokens to come."""
        own = self._slots.get(slot)
        return own is not None and own.num_waiting > 0 and own.end + 1 == len(tokens)

    def agreement(self, tokens: Sequence[int], states: Floats, likeliest: Sequence[int]) -> float:
        """The share of places in a text in which it guesses the target's likeliest token.

        Args:
            tokens: [n], the text, at least two.
            states: [n, all], the target's.
            likeliest: [n], the target's likeliest token behind each.
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
        """Take the states of the positions from `start` on, of tokens that are final."""
        own = self._slots.get(slot)
        if own is None:
            return
        if start > own.end:  # those in between stay unknown: begin anew behind them
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
                self._read([slot], leave=1)  # the last one will guess

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
        """Read the states that wait, as far as the tokens after them are known, in one pass.

        Args:
            slots: the slots.
            leave: number of the last states that go on waiting.
            guesses: the slots' requests, to guess after each one's last entry; then all tokens are
                known. None: only read.

        Returns:
            The slots of the pass, in its order. The others have nothing to read, or no room.
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
                self._reading += self.costs.cost(batch.num_tokens, batch.attention_work)
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
        """Compute the entry of each request's latest guess, from the state that it came from."""
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
    """What entries depend on, by entry: its token, and the first one also on the token before."""
    return [tokens[0] << _TOKEN_BITS | tokens[1], *tokens[2:]] if len(tokens) > 1 else []
