"""The simulated drafter is right as often as it is told to be."""

from __future__ import annotations

from collections.abc import Sequence

from bench.speculation.simulated_drafter import SimulatedDrafter
from specops.speculation.drafters.base import NO_DRAFT, Draft

VOCAB = 320
PROMPT = (5, 6, 7)
TEXT = [(7 * index) % VOCAB for index in range(60)]


def propose(drafter: SimulatedDrafter, tokens: Sequence[int], count: int, slot: int = 0) -> Draft:
    return drafter.look_up(slot, tokens, count)


def make(acceptance: float, *known: tuple[Sequence[int], Sequence[int]]) -> SimulatedDrafter:
    return SimulatedDrafter(acceptance, known or [(PROMPT, TEXT)], vocab_size=VOCAB)


def test_is_wrong_at_the_given_rate_at_positions_that_the_seed_fixes() -> None:
    text = [0] * 20_000

    def right(seed: int) -> list[bool]:
        drafter = SimulatedDrafter(0.7, [(PROMPT, text)], vocab_size=VOCAB, seed=seed)
        return [token == 0 for token in propose(drafter, PROMPT, len(text)).tokens]

    assert abs(sum(right(1)) / len(text) - 0.7) < 0.02  # six standard deviations
    assert right(1) == right(1) != right(2)


def test_mistakes_do_not_depend_on_the_length_of_the_drafts() -> None:
    drafter = make(0.5)
    whole = propose(drafter, PROMPT, 60).tokens
    assert len({token == right for token, right in zip(whole, TEXT, strict=True)}) == 2
    for start in range(0, 57, 3):
        proposed = propose(drafter, [*PROMPT, *TEXT[:start]], 3).tokens
        assert proposed == whole[start : start + 3]


def test_proposes_nothing_where_the_sequence_went_another_way_or_has_ended() -> None:
    drafter = make(1)
    assert propose(drafter, [*PROMPT, TEXT[0] + 1], 2) is NO_DRAFT
    assert propose(drafter, [1, 2], 2) is NO_DRAFT
    assert propose(drafter, [*PROMPT, *TEXT], 2) is NO_DRAFT
