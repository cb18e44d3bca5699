"""An EAGLE-3 head reads each state once, in few passes, and guesses for all slots."""

from __future__ import annotations

import numpy as np
import pytest

from specops.runtime.batch import Batch
from specops.runtime.block_pool import CacheShape
from specops.runtime.kv_cache import KvCache
from specops.runtime.layer_shapes import Attention
from specops.runtime.model_runner import LayerStates
from specops.speculation.drafters import eagle
from specops.speculation.drafters.base import NO_DRAFT, Draft
from specops.speculation.drafters.eagle import MOST_WAITING, EagleDrafter

SURE, UNSURE = 2.0, 0.1  # states: of ten tokens the guess has 0.45 with the first, 0.11 else
Read = tuple[int, int, list[int], int]  # a span: slot, start, tokens, number of logits


class Runner:
    """Guesses the number after each token, as sure as its state says. Notes all passes."""

    def __init__(self, num_blocks: int) -> None:
        shape = CacheShape((Attention(kv_heads=1, head_size=8),), "fp16")
        self.cache = KvCache(shape, num_blocks=num_blocks, num_slots=3, context=256)
        self.given_states = np.zeros((512, 1), np.float32)
        self.next_states = np.zeros((512, 1), np.float32)
        self.passes: list[list[Read]] = []
        self.states: list[list[float]] = []

    def forward(self, batch: Batch) -> np.ndarray:
        self.passes.append(
            [(one.slot, one.start, [*one.tokens], one.num_logits) for one in batch.spans]
        )
        given = self.given_states[: batch.num_tokens, 0].copy()
        self.states.append(given.tolist())
        logits = np.zeros((batch.num_logits, 10), np.float32)
        for row, place in enumerate(batch.logit_rows):
            logits[row, (batch.tokens[place] + 1) % 10] = given[place]
            self.next_states[row] = given[place]
        return logits


class Made:
    """A drafter with its runner and the target's states."""

    def __init__(self, *, depth: int = 3, num_blocks: int = 12) -> None:
        self.runner, self.states = Runner(num_blocks), LayerStates()
        self.drafter = EagleDrafter(
            self.runner,  # type: ignore[arg-type]
            None,
            self.states,
            range(100, 110),
            depth=depth,
            target_seconds=lambda: 1e9,
        )

    def compute(self, slot: int, start: int, *states: float) -> None:
        """The target has computed tokens from a position on."""
        self.states.receive(slot, start, np.array(states, np.float32)[:, None])


def test_a_pass_reads_what_waits_and_further_ones_go_on_where_it_is_likely() -> None:
    made = Made()
    texts = {0: [5, 6, 7], 2: [1, 2]}
    for slot, tokens in texts.items():
        made.drafter.begin(slot, tokens, "ann")
    assert made.states.followed == {0, 2}
    made.compute(0, 0, UNSURE, UNSURE, SURE)
    made.compute(2, 0, UNSURE, UNSURE)
    texts[0].append(8)
    texts[2].append(3)
    found = made.drafter.look_up(0, texts[0], 4, 0.15)
    assert made.runner.passes == [
        [(0, 0, [6, 7, 8], 1), (2, 0, [2, 3], 1)],
        [(0, 3, [109], 1)],
        [(0, 4, [100], 1)],
    ]
    assert found.tokens == (109, 100)
    assert found.accept_probs == pytest.approx((0.45, 0.45), abs=0.01)
    assert made.drafter.look_up(2, texts[2], 4, 0.05).tokens == (104,)
    assert len(made.runner.passes) == 3


def test_what_comes_replaces_the_guesses() -> None:
    made, tokens = Made(), [5, 6]
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, SURE, SURE)
    tokens.append(7)
    assert made.drafter.look_up(0, tokens, 4, 0.05).tokens == (108, 109, 100)
    tokens += [108, 3]  # one guess was right
    made.compute(0, 2, 0.5, 0.25)
    made.drafter.look_up(0, tokens, 1, 0.05)
    assert made.runner.passes[3] == [(0, 2, [108, 3], 1)]
    assert made.runner.states[3] == [0.5, 0.25]


def test_each_draft_is_judged_by_what_came_in_its_own_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the slot's next draft is made because another slot is asked for."""
    made, texts, guesses = Made(depth=1), {0: [5, 6, 7], 2: [1, 2, 3]}, {0: 108, 2: 104}
    judged: list[tuple[tuple[int, ...], list[int]]] = []

    def learn(draft: Draft, came: list[int]) -> None:
        judged.append((draft.tokens, came))

    monkeypatch.setattr(made.drafter._calibration, "learn", learn)
    for slot, tokens in texts.items():
        made.drafter.begin(slot, tokens, "ann")
        made.compute(slot, 0, SURE, SURE)
    for slot, tokens in texts.items():
        assert made.drafter.look_up(slot, tokens, 4, 0.05).tokens == (guesses[slot],)
    for slot, tokens in texts.items():
        tokens += [guesses[slot], 9]
        made.compute(slot, 2, SURE, SURE)
    for slot, tokens in texts.items():
        made.drafter.look_up(slot, tokens, 4, 0.05)
    assert judged == [((108,), [108, 9]), ((104,), [104, 9])]


def test_states_that_come_again_are_read_once_and_missing_ones_begin_anew() -> None:
    made, tokens = Made(depth=1), [5, 6, 7, 8]
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, 1, 2, 3)
    made.compute(0, 1, 2, 3, 4)
    tokens.append(9)
    made.drafter.look_up(0, tokens, 1, 0.0)
    assert made.runner.states == [[1, 2, 3, 4]]
    assert made.drafter.held(0, tokens) == 4
    tokens += [1, 2, 3]
    made.compute(0, 6, 7)
    made.drafter.look_up(0, tokens, 1, 0.0)
    assert made.runner.passes[-1] == [(0, 0, [3], 1)]
    assert made.drafter.held(0, tokens) is None


def test_only_so_many_states_wait() -> None:
    made = Made()
    tokens = list(range(200))
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, *range(MOST_WAITING - 1))
    assert not made.runner.passes
    made.compute(0, MOST_WAITING - 1, 0, 0)
    assert made.runner.passes == [[(0, 0, tokens[1 : MOST_WAITING + 1], 0)]]
    assert made.drafter.look_up(0, tokens, 4) == NO_DRAFT  # the target has not read the text


def test_without_room_a_slot_is_let_go() -> None:
    made = Made(num_blocks=1)
    tokens = list(range(100))
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, *range(99))
    assert (made.runner.passes, made.states.followed) == ([], set())
    assert made.drafter.held(0, tokens) is None
    assert made.drafter.look_up(0, tokens, 4) == NO_DRAFT
    made.compute(0, 99, 0)
    made.drafter.release(0)


def test_a_guess_that_costs_more_than_it_may_bring_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But one is tried again after a while: a pass may have been slow for another reason."""
    monkeypatch.setattr(eagle, "_FADING", 0.99)
    made, tokens, lengths = Made(), [5, 6], list[int]()
    made.drafter._seconds, made.drafter._target_seconds = 2.0, lambda: 1.0
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, SURE, SURE)
    tokens.append(7)
    for place in range(2, 152):
        found = made.drafter.look_up(0, tokens, 4, 0.05)
        lengths.append(len(found.tokens))
        made.compute(0, place, SURE)
        tokens.append(found.tokens[0])
    assert lengths[:69] == [1] * 69  # not even a sure guess pays before
    assert max(lengths) > 1
