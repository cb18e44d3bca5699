"""What was looked up comes before what a model has to compute, and it is said whose it is."""

from __future__ import annotations

from specops.speculation.drafters.base import Draft
from specops.speculation.drafters.cascade import CascadeDrafter
from specops.speculation.drafters.draft_model import DraftModelDrafter
from specops.speculation.drafters.suffix import SuffixDrafter
from tests.simulated_target import VOCAB, SimulatedTarget
from tests.speculation.drafters.ask import ask, propose

REPEATING = [5, 6, 7, 5, 6]
FRESH = [5, 6, 7, 8]


def made(runner: SimulatedTarget, *slots: int) -> tuple[CascadeDrafter, DraftModelDrafter]:
    """A cascade, and its model, which was told of these slots."""
    model = DraftModelDrafter(runner, vocab_size=VOCAB)  # type: ignore[arg-type]
    for slot in slots or (0,):
        model.begin(slot, FRESH, "")
    lookup = SuffixDrafter()
    lookup.begin(0, FRESH, "")
    return CascadeDrafter(lookup, model), model


def test_a_lookup_costs_no_pass_and_is_named(runner: SimulatedTarget) -> None:
    cascade, _ = made(runner)
    found = cascade.look_up(0, REPEATING, 2)
    assert (found.tokens, found.origin) == ((7, 5), "suffix")
    assert not runner.passes


def test_a_lookup_in_vain_is_named_too(runner: SimulatedTarget) -> None:
    cascade, _ = made(runner)
    assert cascade.look_up(0, FRESH, 2) == Draft(origin="suffix")


def test_the_model_catches_up_on_what_others_proposed(runner: SimulatedTarget) -> None:
    """It computes what it has not seen, once, and proposes as if it had always been asked."""
    cascade, model = made(runner, 0, 1)
    drafted = propose(cascade, FRESH, 4).tokens  # the cache now holds 3 of them
    tokens = [*FRESH, *drafted[:2], 30, 5, 6, 7, 5, 6, 31]  # most of it was looked up
    assert cascade.backlog(0, len(tokens)) == len(tokens) - 7
    passes = len(runner.passes)
    found = propose(cascade, tokens, 1)
    assert [batch.num_tokens for batch in runner.passes[passes:]] == [7]  # 30 and all after it
    assert found.tokens == propose(model, tokens, 1, slot=1).tokens


def test_a_slot_of_the_cascade_is_one_of_both_parts(runner: SimulatedTarget) -> None:
    lookup, model = SuffixDrafter(), DraftModelDrafter(runner, vocab_size=VOCAB)  # type: ignore[arg-type]
    cascade = CascadeDrafter(lookup, model)
    cascade.begin(0, FRESH, "")
    assert cascade.look_up(0, REPEATING, 2).tokens == (7, 5)
    assert [draft.origin for draft in cascade.propose([ask(FRESH, 1)])] == ["draft"]
    assert runner.cache.used_blocks == 1
    cascade.release(0)
    assert runner.cache.used_blocks == 0
    assert not lookup._slots
