"""Draft tokens by an EAGLE-3 head: one layer that reads hidden states of the target's layers.

The head's entry at position i joins the target's states at i with the token at i + 1, and guesses
the token at i + 2. Its keys and values lie in a KV cache of its own, which counts and shares blocks
as the target's does: an entry depends on the tokens up to i + 1 alone. As the target computes
tokens, their states are handed over and wait here; one pass reads all that wait and makes the first
guess, of all slots. From there on the head's own state takes the place of the target's, and each
further guess is one more pass. The tokens that really follow overwrite those entries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.model_runner import Fusion, LayerStates, ModelRunner
from specops.runtime.sampling import Floats, draw_seeded, filtered_probs, logprob
from specops.speculation.drafters.base import (
    LEAST_REACH,
    NO_DRAFT,
    Draft,
    DraftRequest,
    LookupDrafter,
)
from specops.speculation.drafters.calibration import Calibration

MOST_WAITING = 64  # states of a slot; they are read when there are so many, asked or not
_TOKEN_BITS = 32
_KINDS = 6
_FIRST_PROMISE = 0.5  # of the mean promises, before there were any
_WEIGHT = 1 / 48  # of the newest promise in them
_DOUBT = _WEIGHT / 256  # of the promise of the guess before, where a guess was not worth its time


@dataclass(slots=True)
class _Slot:
    """What the head has of one sequence.

    Attributes:
        tokens: the sequence's, as far as they are known; the list grows outside.
        waiting: [MOST_WAITING, size], states of the positions behind the entries, which the head
            has not read.
        first: position of the head's first entry: the target may have taken those before from its
            cache, without their states.
        entries: number of final entries.
        num_waiting: number of states that wait.
        draft: the latest one.
        length: number of tokens that `draft` follows; 0: there is none.
        reach: the probability that the whole draft is accepted.
        kinds: of its guesses, see `_kind`.
    """

    tokens: Sequence[int]
    waiting: Floats
    first: int = 0
    entries: int = 0
    num_waiting: int = 0
    draft: Draft = field(default_factory=lambda: NO_DRAFT)
    length: int = 0
    reach: float = 1.0
    kinds: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after those whose states are here."""
        return self.first + self.entries + self.num_waiting


class EagleDrafter(LookupDrafter):
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

    def __init__(
        self,
        runner: ModelRunner,
        fusion: Fusion | None,
        states: LayerStates,
        *,
        tokens: Sequence[int],
        depth: int,
        calibration: Sequence[tuple[float, float]] = (),
        costs: CostModel,
    ) -> None:
        self.runner = runner
        self.costs = costs
        self._fusion = fusion
        self._states = states
        self._tokens = tokens
        self._rows: slice | npt.NDArray[np.int64] = np.array(tokens)  # by token, as noise is
        if isinstance(tokens, range):
            self._rows = slice(tokens.start, tokens.stop)
        self._probs: Floats = np.zeros(max(tokens) + 1, np.float32)
        self._calibration = Calibration(calibration, depth, _KINDS)
        self._usual = [_FIRST_PROMISE] * depth  # mean promise of each guess in a row
        self._guesses: list[tuple[int, float]] = []  # of the latest pass: token, how sure of it
        self._slots: dict[int, _Slot] = {}
        self._reading = 0.0
        states.receive = self._receive

    def read_seconds(self, slot: int) -> float:
        """Seconds that it takes to read the state of a prompt's token."""
        return self.costs.cost(MOST_WAITING) / MOST_WAITING if slot in self._slots else 0.0

    def take_reading(self) -> float:
        """Seconds of the passes that made no guess, by their costs."""
        seconds, self._reading = self._reading, 0.0
        return seconds

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        """Begin a slot with what earlier requests left of its entries."""
        held = self.runner.cache.allocate(slot, _keys(tokens), client)
        waiting: Floats = np.empty((MOST_WAITING, self._states.size), np.float32)
        self._slots[slot] = _Slot(tokens, waiting, entries=held)
        self._states.followed.add(slot)

    def held(self, slot: int, tokens: Sequence[int]) -> int | None:
        """The number of tokens whose states it does not need; see `LookupDrafter.held`."""
        own, cache = self._slots.get(slot), self.runner.cache
        if own is None:  # there was no room for it
            return None
        if not (own.first or own.num_waiting):
            for ahead, other in list(self._slots.items()):
                end = other.entries + 1
                if other.num_waiting > 1 and cache.shares_prefix(ahead, slot, end):
                    # What it has not read yet would have to be computed again.
                    self._read([ahead], leave=1)
                    cache.take_snapshot(ahead)
            own.entries = cache.match_prefix(slot, _keys(tokens))
        return None if own.first else own.end

    def release(self, slot: int) -> None:
        """Forget the slot's sequence. The prefix cache may keep its entries."""
        own = self._slots.get(slot)
        try:
            shares = self.runner.cache.reuse is not PrefixSharing.OFF
            if own is not None and not own.first and shares:
                self._read([slot], leave=0)  # a request that goes on from here begins behind them
        finally:
            self._let_go(slot)

    def follows(self, slot: int, tokens: Sequence[int]) -> bool:
        """Whether it has the states of all tokens but the last; not of tokens to come."""
        own = self._slots.get(slot)
        return own is not None and own.end + 1 == len(tokens)

    def prepare(self, requests: Sequence[DraftRequest], token_seconds: float) -> None:
        """Guess for the requests whose texts have moved on, in one pass for each guess."""
        going = {
            item.slot: item
            for item in requests
            if self.follows(item.slot, item.text)
            and (own := self._slots[item.slot]).num_waiting
            and own.length != len(item.text)
        }
        slots = self._read(list(going), leave=0, guesses=going)
        for slot in slots:
            own = self._slots[slot]
            if own.length:  # learn from what came in a draft's place, whether verified or not
                self._calibration.learn(own.draft, own.tokens[own.length :], own.kinds)
            own.draft, own.length, own.reach = NO_DRAFT, len(own.tokens), 1.0
            own.kinds = []
        guess = 0
        while slots:
            self._take(guess, [going[slot] for slot in slots])
            share = self.costs.cost(len(slots)) / token_seconds / len(slots)
            rows = [row for row, slot in enumerate(slots) if self._pays(guess, going[slot], share)]
            slots = self._go_on(guess, [going[slots[row]] for row in rows], rows)
            guess += 1

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, min_reach: float = LEAST_REACH
    ) -> Draft:
        """The guesses for the slot that `prepare` has made."""
        own = self._slots.get(slot)
        if own is None or own.length != len(tokens):
            return NO_DRAFT
        return own.draft.likely(count, min_reach)

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
        self._forward(batch, [states[:-1]], [DraftRequest(0, tokens)] * (len(tokens) - 1))
        cache.release(0)
        guessed = [token for token, _ in self._guesses]
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
            room = MOST_WAITING - own.num_waiting
            more, rows = rows[:room], rows[room:]
            own.waiting[own.num_waiting : own.num_waiting + len(more)] = more
            own.num_waiting += len(more)
            if own.num_waiting == MOST_WAITING:
                self._read([slot], leave=1)  # the last one will guess

    def _let_go(self, slot: int) -> None:
        if self._slots.pop(slot, None) is not None:
            self.runner.cache.release(slot)
            self._states.followed.discard(slot)

    def _read(
        self,
        slots: Sequence[int],
        *,
        leave: int,
        guesses: Mapping[int, DraftRequest] | None = None,
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
            asked = [] if guesses is None else [guesses[slot] for slot in members]
            self._forward(batch, rows, asked)
            if guesses is None:
                self._reading += self.costs.cost(batch.num_tokens, batch.attention_work)
        for slot, read in zip(members, rows, strict=True):
            own = self._slots[slot]
            left = own.num_waiting - len(read)
            own.waiting[:left] = own.waiting[len(read) : own.num_waiting]
            own.num_waiting, own.entries = left, own.entries + len(read)
            keys = own.tokens[own.first + 1 :] if own.first else _keys(own.tokens)
            self.runner.cache.commit(slot, keys, own.entries)
        return members

    # -- guesses -----------------------------------------------------------------------------------

    def _forward(
        self, batch: Batch, states: Sequence[Floats], asked: Sequence[DraftRequest]
    ) -> None:
        """Run a pass over the target's states, for the first guess of each request."""
        begun = time.perf_counter()
        given = self.runner.given_states if self._fusion is None else self._fusion.states
        if given is not None:
            np.concatenate(states, out=given[: batch.num_tokens])
        if self._fusion is not None:
            self._fusion.run(batch.num_tokens)
        self._guess(0, batch, asked, begun)

    def _guess(self, guess: int, batch: Batch, asked: Sequence[DraftRequest], begun: float) -> None:
        """Run a pass over the runner's states, and choose a token by each row of logits."""
        logits = self.runner.forward(batch)
        self._guesses = [
            self._choose(request, len(request.text) + guess, row)
            for request, row in zip(asked, logits, strict=True)
        ]
        self.costs.observe(batch.num_tokens, batch.attention_work, time.perf_counter() - begun)

    def _choose(self, request: DraftRequest, place: int, logits: Floats) -> tuple[int, float]:
        """The token for a place of a text, and how sure it is.

        Drawn by the target's noise it is the target's more often than the likeliest: of two equally
        likely ones that in two draws out of two. How sure the head is of the likeliest says more
        about this than how likely the drawn one was.
        """
        if request.noise is None:
            ((row, sure),) = logprob(logits, 0, 1).top
            return self._tokens[row], math.exp(sure)
        (probs,) = filtered_probs(logits[None], request.sampling)
        self._probs[self._rows] = probs
        return draw_seeded(self._probs, request.noise, place), float(probs.max())

    def _take(self, guess: int, requests: Sequence[DraftRequest]) -> None:
        """Add the guesses of the latest pass to the requests' drafts."""
        for request, (token, sure) in zip(requests, self._guesses, strict=True):
            own = self._slots[request.slot]
            tokens = (*own.draft.tokens, token)
            own.kinds.append(_kind(request, tokens))
            probability = self._calibration.promise(guess, sure, own.kinds[-1])
            own.draft = Draft(tokens, accept_probs=(*own.draft.accept_probs, probability))
            own.reach *= probability
            self._usual[guess] += _WEIGHT * (probability - self._usual[guess])

    def _pays(self, guess: int, request: DraftRequest, share: float) -> bool:
        """Whether a request's next guess is worth its `share` of a pass, in tokens."""
        following = guess + 1
        if following >= min(request.max_draft, self._calibration.depth):
            return False
        usual = self._usual[following]
        reach = self._slots[request.slot].reach * usual
        if not request.adaptive or reach >= request.min_reach + share:
            return True
        # What is never tried cannot prove better: in the end it is tried again, but rarely.
        self._usual[following] += _DOUBT * (self._usual[guess] - usual)
        return False

    def _go_on(
        self, guess: int, requests: Sequence[DraftRequest], rows: Sequence[int]
    ) -> list[int]:
        """Compute the entry of each request's latest guess, from the state that it came from.

        Args:
            guess: the number of guesses before it.
            requests: the requests.
            rows: for each, the row of the latest pass that it came from.

        Returns:
            The slots of the pass. The others have no room.
        """
        begun, batch, kept = time.perf_counter(), Batch(), list[int]()
        asked = list[DraftRequest]()
        for request, row in zip(requests, rows, strict=True):
            own = self._slots[request.slot]
            place = own.entries + guess
            length = place + 1
            if length <= self.runner.cache.context and self.runner.cache.reserve(
                request.slot, length
            ):
                batch.add(request.slot, place, own.draft.tokens[-1:], 1)
                asked.append(request)
                kept.append(row)
        given, made = self.runner.given_states, self.runner.next_states
        if kept and given is not None and made is not None:
            given[: len(kept)] = made[kept]
            self._guess(guess + 1, batch, asked, begun)
        else:
            self._guesses = []
        return [span.slot for span in batch.spans]


def _kind(request: DraftRequest, tokens: tuple[int, ...]) -> int:
    """What the last one of guesses has to be calibrated by: below `_KINDS`.

    What is drawn is less often the likeliest token. And a lookup that says the same is evidence of
    another kind, as one that says something else is evidence against it.
    """
    found = request.draft.tokens[: len(tokens)]
    seen = len(found) == len(tokens)
    return 3 * (request.sampling.temperature > 0) + seen * (1 + (found == tokens))


def _keys(tokens: Sequence[int]) -> list[int]:
    """What entries depend on, by entry: its token, and the first one also on the token before."""
    return [tokens[0] << _TOKEN_BITS | tokens[1], *tokens[2:]] if len(tokens) > 1 else []
