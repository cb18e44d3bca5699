"""An EAGLE-3 head reads each state once, in few passes, and guesses for all slots."""

import numpy as np
import pytest

from specops.request import SamplingParams
from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.kvcache.block_pool import CacheShape
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.layer_shapes import Attention
from specops.runtime.model_runner import AuxHiddenStates
from specops.runtime.sampling import draw_seeded
from specops.speculation.drafters.accept_probs import Guesses
from specops.speculation.drafters.base import Draft
from specops.speculation.drafters.eagle import MAX_WAITING, EagleDrafter
from tests.speculation.drafters.ask import ask

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


class Costs(CostModel):
    """A pass takes so many seconds, however long it takes here."""

    def __init__(self, seconds: float) -> None:
        super().__init__([1], [seconds])

    def cost(
        self, tokens: int, work: float = 0.0, spans: int = 1, logits: int | None = None
    ) -> float:
        return self.seconds[0]

    def observe(
        self, tokens: int, work: float, seconds: float, spans: int = 1, logits: int | None = None
    ) -> None:
        pass


class Made:
    """A drafter with its runner and the target's states, beside a target of a token a second."""

    def __init__(self, *, depth: int = 3, num_blocks: int = 12, seconds: float = 1e-9) -> None:
        self.runner, self.states = Runner(num_blocks), AuxHiddenStates(1)
        self.drafter = EagleDrafter(
            self.runner,  # type: ignore[arg-type]
            None,
            self.states,
            tokens=range(100, 110),
            depth=depth,
            costs=Costs(seconds),
        )

    def compute(self, slot: int, start: int, *states: float) -> None:
        """The target has computed tokens from a position on."""
        self.states.receive(slot, start, np.array(states, np.float32)[:, None])

    def ask(self, texts: dict[int, list[int]], count: int, min_reach: float) -> list[Draft]:
        """Ask for some slots together."""
        fields = {"min_reach": min_reach, "token_seconds": 1.0, "adaptive": True}
        contexts = [ask(tokens, count, slot, **fields) for slot, tokens in texts.items()]
        return self.drafter.propose(contexts)

    def look_up(self, slot: int, tokens: list[int], count: int, min_reach: float = 0.02) -> Draft:
        (found,) = self.ask({slot: tokens}, count, min_reach)
        return found


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
    found, other = made.ask(texts, 4, 0.15)
    assert made.runner.passes == [
        [(0, 0, [6, 7, 8], 1), (2, 0, [2, 3], 1)],
        [(0, 3, [109], 1)],  # a third guess would not be reached often enough
    ]
    assert found.tokens == (109, 100)
    assert found.accept_probs == pytest.approx((0.45, 0.45), abs=0.01)
    assert other.tokens == ()  # less likely than it must be


@pytest.mark.parametrize("noise", range(8))
def test_where_the_target_draws_guesses_are_drawn_by_its_noise(noise: int) -> None:
    """All ten tokens are equally likely here, so the target's draws alone decide."""
    made, tokens, sampling = Made(), [5, 6], SamplingParams(1.0)
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, 0.0, 0.0)
    tokens.append(7)
    request = ask(tokens, 3, sampling=sampling, noise=noise)
    (draft,) = made.drafter.propose([request])
    target = np.zeros(200, np.float32)
    target[100:110] = 0.1
    expected = tuple(draw_seeded(target, noise, place) for place in (3, 4, 5))
    assert draft.tokens == expected
    assert draft.accept_probs == pytest.approx((0.1, 0.1, 0.1))


def test_what_comes_replaces_the_guesses() -> None:
    made, tokens = Made(), [5, 6]
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, SURE, SURE)
    tokens.append(7)
    assert made.look_up(0, tokens, 4, 0.05).tokens == (108, 109, 100)
    tokens += [108, 3]  # one guess was right
    made.compute(0, 2, 0.5, 0.25)
    made.look_up(0, tokens, 1, 0.05)
    assert made.runner.passes[3] == [(0, 2, [108, 3], 1)]
    assert made.runner.states[3] == [0.5, 0.25]


@pytest.mark.parametrize("min_reach", [0.05, 0.99])
def test_each_draft_is_judged_by_what_came_in_its_own_place(
    min_reach: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was not likely enough: a promise that is too low could never rise again."""
    made, texts, guesses = Made(depth=1), {0: [5, 6, 7], 2: [1, 2, 3]}, {0: 108, 2: 104}
    judged: list[tuple[tuple[int, ...], list[int]]] = []

    def learn(guesses: Guesses, came: list[int]) -> None:
        judged.append((tuple(guesses.tokens), came))

    monkeypatch.setattr(made.drafter._calibration, "_learn", learn)
    for slot, tokens in texts.items():
        made.drafter.begin(slot, tokens, "ann")
        made.compute(slot, 0, SURE, SURE)
    found = [draft.tokens for draft in made.ask(texts, 4, min_reach)]
    assert found == ([(108,), (104,)] if min_reach < 0.5 else [(), ()])
    for slot, tokens in texts.items():
        tokens += [guesses[slot], 9]
        made.compute(slot, 2, SURE, SURE)
    made.ask(texts, 4, 0.05)
    assert judged == [((108,), [108]), ((104,), [104])]


def test_a_second_guess_that_was_mostly_wrong_is_tried_again() -> None:
    """Rarely while it stays wrong, and always again soon after it has become right."""
    made = Made(depth=2)

    def second_guesses(count: int, *, right: bool) -> int:
        before = len(made.runner.passes)
        for _ in range(count):
            tokens = [101, 102]
            made.drafter.begin(0, tokens, "ann")
            made.compute(0, 0, 5.0, 5.0)
            tokens.append(103)
            made.look_up(0, tokens, 2, 0.2)
            tokens += [104, 105 if right else 101]
            made.compute(0, 2, 5.0, 5.0, 5.0)
            tokens.append(106)
            made.look_up(0, tokens, 1, 0.2)  # learns what came
            made.drafter.release(0)
        return len(made.runner.passes) - before - 2 * count

    assert second_guesses(50, right=True) == 50
    second_guesses(400, right=False)
    assert second_guesses(400, right=False) < 20
    second_guesses(400, right=True)
    assert second_guesses(50, right=True) == 50


def test_what_a_lookup_says_counts_for_or_against_a_guess() -> None:
    """Guesses are sure to the same degree, and right only where the lookup says the same."""
    made, tokens = Made(depth=1), [5]
    made.drafter.begin(0, tokens, "ann")
    promised = [0.0] * 3
    for place in range(120):
        made.compute(0, 2 * place, SURE)
        tokens.append(place % 10)
        guess = 100 + (place + 1) % 10
        said = ((), (7,), (guess,))[place % 3]
        asking = ask(tokens, 4, min_reach=0.0, adaptive=True, draft=Draft(said))
        (promised[place % 3],) = made.drafter.propose([asking])[0].accept_probs
        made.compute(0, 2 * place + 1, SURE)
        tokens.append(guess if said == (guess,) else 55)
    assert max(promised[:2]) < 0.25
    assert promised[2] > 0.75


def test_passes_are_run_only_for_those_that_ask_and_as_long_as_their_drafts_may_be() -> None:
    made, texts = Made(depth=4), {slot: [5, 6, 7] for slot in range(3)}
    for slot, tokens in texts.items():
        made.drafter.begin(slot, tokens, "ann")
        made.compute(slot, 0, SURE, SURE)
    made.drafter.propose([ask(texts[0], 1), ask(texts[2], 3, 2)])
    assert [[one[0] for one in spans] for spans in made.runner.passes] == [[0, 2], [2], [2]]


def test_states_that_come_again_are_read_once_and_missing_ones_begin_anew() -> None:
    made, tokens = Made(depth=1), [5, 6, 7, 8]
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, 1, 2, 3)
    made.compute(0, 1, 2, 3, 4)
    tokens.append(9)
    made.look_up(0, tokens, 1, 0.0)
    assert made.runner.states == [[1, 2, 3, 4]]
    assert made.drafter.required_prefix(0, tokens) == 4
    tokens += [1, 2, 3]
    made.compute(0, 6, 7)
    made.look_up(0, tokens, 1, 0.0)
    assert made.runner.passes[-1] == [(0, 0, [3], 1)]
    assert made.drafter.required_prefix(0, tokens) is None


def test_only_so_many_states_wait() -> None:
    made = Made()
    tokens = list(range(200))
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, *range(MAX_WAITING - 1))
    assert not made.runner.passes
    made.compute(0, MAX_WAITING - 1, 0, 0)
    assert made.runner.passes == [[(0, 0, tokens[1:MAX_WAITING], 0)]]
    assert not made.drafter.is_synced(0, tokens)  # the target has not read the text


def test_without_room_a_slot_is_let_go() -> None:
    made = Made(num_blocks=1)
    tokens = list(range(140))
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, *range(139))
    assert len(made.runner.passes) == 1  # as far as there was room
    assert made.states.followed == set()
    assert made.drafter.required_prefix(0, tokens) is None
    assert not made.drafter.is_synced(0, tokens)
    made.compute(0, 139, 0)
    made.drafter.release(0)


@pytest.mark.parametrize(("seconds", "length"), [(0.08, 3), (0.15, 2), (0.3, 1)])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_guess_that_costs_more_than_it_may_bring_is_not_made(
    seconds: float, length: int, slots: int
) -> None:
    """Of a pass that guesses for several each has its part."""
    made, texts = Made(seconds=seconds * slots), {slot: [5, 6, 7] for slot in range(slots)}
    for slot, tokens in texts.items():
        made.drafter.begin(slot, tokens, "ann")
        made.compute(slot, 0, SURE, SURE)
    assert [len(draft.tokens) for draft in made.ask(texts, 4, 0.0)] == [length] * slots


def test_one_that_has_no_room_for_what_waits_leaves_those_that_begin_like_it_alone() -> None:
    """It was let go while another asked for it, and the other one's request failed."""
    made = Made(num_blocks=2)
    tokens = list(range(140))
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, *range(131))  # five wait, and two of them fit into the two blocks
    made.drafter.begin(1, tokens, "ann")
    assert made.drafter.required_prefix(1, tokens) == 126
    assert made.states.followed == {1}


def test_what_waits_at_the_end_is_read_so_that_the_next_turn_begins_behind_it() -> None:
    made, tokens = Made(), list(range(80))
    made.drafter.begin(0, tokens, "ann")
    made.compute(0, 0, *range(79))
    made.drafter.release(0)
    assert [one[1] for spans in made.runner.passes for one in spans] == [0, 63]
    made.drafter.begin(1, [*tokens, 5], "ann")
    assert made.drafter.required_prefix(1, tokens) == 79
