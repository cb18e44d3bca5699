"""Draft tokens by an EAGLE-3 head: one layer that reads what several layers of the target made.

The head's entry at position i joins the target's states at i with the token at i + 1, and guesses
the token at i + 2. Its keys and values lie in a KV cache of its own, which counts and shares blocks
as the target's does: an entry depends on the tokens up to i + 1 alone. As the target computes
tokens, their states are handed over and wait here; one pass reads all that wait and makes the first
guess, of all slots. From there on the head's own state takes the place of the target's, and each
further guess is one more pass. Those entries are overwritten by what really comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specops.runtime.batch import Batch
from specops.runtime.cost_model import mean_with
from specops.runtime.model_runner import LayerStates, ModelRunner
from specops.runtime.sampling import Floats
from specops.speculation.drafters.base import LEAST_REACH, NO_DRAFT, Draft, LookupDrafter
from specops.speculation.drafters.head import Calibration

MOST_WAITING = 64  # states of a slot; they are read when there are more, asked or not
_TOKEN_BITS = 32
_WEIGHT = 1 / 32  # of the newest pass in the mean cost of a guess
_FADING = 1023 / 1024  # of that mean where no pass is run: one that was slow is not the last


@dataclass(slots=True)
class _Slot:
    """What the head has of one sequence.

    Attributes:
        tokens: the sequence's, as far as they are known; the list grows outside.
        first: position of the head's first entry: the target may have taken those before from its
            cache, without their states.
        entries: number of final entries.
        waiting: states [n, size] of the positions that follow, which the head has not read.
        num_waiting: number of these positions.
        length: number of tokens that `draft` follows; 0: there is none.
        judged: number of tokens that the draft to be judged by what comes followed; 0: none.
    """

    tokens: Sequence[int]
    first: int = 0
    entries: int = 0
    waiting: list[Floats] = field(default_factory=list)
    num_waiting: int = 0
    draft: Draft = field(default_factory=lambda: NO_DRAFT)
    length: int = 0
    judged: int = 0

    @property
    def end(self) -> int:
        """The position after those whose states are here."""
        return self.first + self.entries + self.num_waiting


class EagleDrafter(LookupDrafter):
    """Guesses one token after the other, as long as the next guess seems to pay.

    Args:
        runner: the head, with as many slots as the target has.
        fuse: joins the states of several layers, [n, all] to [n, size]; None: there is one.
        states: hands over what the target's layers read.
        tokens: the tokens that the head can guess, in the order of its logits.
        depth: largest number of guesses in a row.
        calibration: factor and summand for the logit of each guess in a row, see `HeadFolder`.
        target_seconds: what a pass of the target over one token costs now.
    """

    name = "head"

    def __init__(
        self,
        runner: ModelRunner,
        fuse: Callable[[Floats], Floats] | None,
        states: LayerStates,
        tokens: Sequence[int],
        *,
        depth: int,
        calibration: Sequence[tuple[float, float]] = (),
        target_seconds: Callable[[], float],
    ) -> None:
        self.runner = runner
        self._fuse = fuse
        self._states = states
        self._tokens = np.array(tokens)
        self._calibration = Calibration(calibration, depth)
        self._target_seconds = target_seconds
        self._logits: Floats = np.empty((0, len(tokens)), np.float32)  # of the latest pass
        self._seconds = 0.0  # mean of a pass that makes another guess
        self._slots: dict[int, _Slot] = {}
        states.receive = self._receive

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Begin a slot with what earlier requests left of its entries."""
        held = self.runner.cache.begin(slot, _keys(tokens), client)
        self._slots[slot] = _Slot(tokens, entries=held)
        self._states.followed.add(slot)

    def held(self, slot: int, tokens: Sequence[int]) -> int | None:
        """The number of tokens whose states it does not need; see `LookupDrafter.held`."""
        own = self._slots.get(slot)
        if own is None:  # there was no room for it
            return None
        if not (own.first or own.num_waiting):
            own.entries = self.runner.cache.extend_prefix(slot, _keys(tokens))
        return None if own.first else own.end

    def release(self, slot: int) -> None:
        """Forget the slot's sequence. The prefix cache may keep its entries."""
        if self._slots.pop(slot, None) is not None:
            self.runner.cache.release(slot)
            self._states.followed.discard(slot)

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, min_reach: float = LEAST_REACH
    ) -> Draft:
        """The guesses for the slot. Passes make them for all slots that have moved on."""
        own = self._slots.get(slot)
        if own is None or own.end + 1 != len(tokens):
            return NO_DRAFT
        if own.length != len(tokens):
            self._draft(min_reach)
        if own.length != len(tokens):
            return NO_DRAFT
        found = own.draft.likely(count, min_reach)
        if found.tokens:
            own.judged = own.length
        return found

    def agreement(self, tokens: Sequence[int], states: Floats, likeliest: Sequence[int]) -> float:
        """The share of places in a text in which it guesses the target's likeliest token.

        Args:
            tokens: [n], the text, at least two.
            states: [n, all], the target's.
            likeliest: [n], the target's likeliest token behind each.
        """
        cache, batch = self.runner.cache, Batch()
        cache.begin(0, tokens[1:], share=False)
        cache.reserve(0, len(tokens) - 1)
        batch.add(0, 0, tokens[1:], len(tokens) - 1)
        self._forward(batch, self._fused(states[:-1]))
        cache.release(0)
        return float((self._tokens[self._logits.argmax(1)] == likeliest[1:]).mean())

    # -- the target's states -----------------------------------------------------------------------

    def _receive(self, slot: int, start: int, rows: Floats) -> None:
        """Take the states of the positions from `start` on, of tokens that are final."""
        own = self._slots.get(slot)
        if own is None:
            return
        if start > own.end:  # those in between stay unknown: begin anew behind them
            self.runner.cache.release(slot)
            self.runner.cache.begin(slot, (), share=False)
            own.first, own.entries, own.num_waiting = start, 0, 0
            own.waiting.clear()
        rows = rows[own.end - start :]
        if len(rows):
            own.waiting.append(rows.copy())
            own.num_waiting += len(rows)
        if own.num_waiting >= MOST_WAITING:
            self._read([slot])

    def _read(self, slots: Sequence[int], *, guess: bool = False) -> list[int]:
        """Read the states that wait, as far as the tokens after them are known, in one pass.

        Args:
            slots: the slots.
            guess: also compute the logits after each slot's last entry; then all tokens are known.

        Returns:
            The slots of the pass, in its order. The others have no room.
        """
        batch, members, rows = Batch(), list[int](), list[Floats]()
        for slot in slots:
            own = self._slots[slot]
            place = own.first + own.entries + 1  # of the first entry's token
            count = own.num_waiting if guess else own.num_waiting - 1  # the last one will guess
            tokens = own.tokens[place : place + count]
            length = own.entries + len(tokens)
            if not tokens or length > self.runner.cache.context:
                continue
            if not self.runner.cache.reserve(slot, length):
                self.release(slot)
                continue
            batch.add(slot, own.entries, tokens, int(guess))
            waiting = np.concatenate(own.waiting)
            rows.append(waiting[: len(tokens)])
            own.waiting = [waiting[len(tokens) :]]
            own.num_waiting -= len(tokens)
            own.entries = length
            members.append(slot)
        if members:
            self._forward(batch, self._fused(np.concatenate(rows)))
        for slot in members:
            own = self._slots[slot]
            keys = own.tokens[own.first + 1 :] if own.first else _keys(own.tokens)
            self.runner.cache.commit(slot, keys, own.entries)
        return members

    def _fused(self, states: Floats) -> Floats:
        return states if self._fuse is None else self._fuse(states)

    def _forward(self, batch: Batch, states: Floats) -> None:
        if self.runner.given_states is not None:
            self.runner.given_states[: len(states)] = states
        self._logits = self.runner.forward(batch)

    # -- guesses -----------------------------------------------------------------------------------

    def _draft(self, min_reach: float) -> None:
        """Guess for all slots whose tokens have moved on."""
        slots = [
            slot
            for slot, own in self._slots.items()
            if own.num_waiting and own.end + 1 == len(own.tokens)
        ]
        slots = self._read(slots, guess=True)
        reaches = dict.fromkeys(slots, 1.0)
        for slot in slots:
            own = self._slots[slot]
            self._judge(own)  # before its draft is replaced, whichever slot was asked for
            own.draft, own.length = NO_DRAFT, len(own.tokens)
        for guess in range(self._calibration.depth):
            rows = self._take(guess, slots, reaches)
            bound = min_reach
            if self._seconds:  # of which each slot has its part
                bound += self._seconds / self._target_seconds() / max(1, len(slots))
            going_on = [index for index, slot in enumerate(slots) if reaches[slot] >= bound]
            if guess + 1 == self._calibration.depth:
                return
            begun = time.perf_counter()
            slots = self._go_on(guess, [slots[index] for index in going_on], rows[going_on])
            if not slots:
                self._seconds *= _FADING
                return
            seconds = time.perf_counter() - begun
            self._seconds = mean_with(self._seconds, seconds, _WEIGHT)

    def _take(self, guess: int, slots: Sequence[int], reaches: dict[int, float]) -> Floats:
        """Add the likeliest token of each row of the latest pass to its slot's draft.

        Returns:
            The states that further guesses follow from, [n, size].
        """
        logits = self._logits
        best = logits.argmax(1)
        sure = 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)
        for slot, row, confidence in zip(slots, best.tolist(), sure.tolist(), strict=True):
            own, probability = self._slots[slot], self._calibration.promise(guess, confidence)
            own.draft = Draft(
                (*own.draft.tokens, int(self._tokens[row])),
                accept_probs=(*own.draft.accept_probs, probability),
            )
            reaches[slot] *= probability
        states = self.runner.next_states
        return np.empty((0, 0), np.float32) if states is None else states[: len(slots)]

    def _go_on(self, guess: int, slots: Sequence[int], states: Floats) -> list[int]:
        """Compute the entry of each slot's latest guess, from the state that it came from."""
        batch, rows, members = Batch(), list[int](), list[int]()
        for row, slot in enumerate(slots):
            own = self._slots[slot]
            place = own.entries + guess
            room = place < self.runner.cache.context and self.runner.cache.reserve(slot, place + 1)
            if room:
                batch.add(slot, place, own.draft.tokens[-1:], 1)
                members.append(slot)
                rows.append(row)
        if members:
            self._forward(batch, states[rows])
        return members

    def _judge(self, own: _Slot) -> None:
        """Learn from the tokens that came in the place of a draft, whether verified or not."""
        if own.judged:
            self._calibration.learn(own.draft, own.tokens[own.judged :])
            own.judged = 0


def _keys(tokens: Sequence[int]) -> list[int]:
    """What entries depend on, by entry: its token, and the first one also on the token before."""
    return [tokens[0] << _TOKEN_BITS | tokens[1], *tokens[2:]] if len(tokens) > 1 else []
