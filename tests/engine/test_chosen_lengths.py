"""A step says of each draft whether the controller chose its length."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specops.request import GRAMMAR, Grammar, GrammarKind, SamplingParams
from specops.speculation.drafters.base import Draft, LookupDrafter
from tests.simulated_target import SimulatedTarget, Text, make_request, make_scheduler, serve


class Sure(LookupDrafter):
    """Proposes anything."""

    name = "sure"

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, min_reach: float = 0.0
    ) -> Draft:
        return Draft((7,) * count)


@pytest.mark.parametrize("adaptive", [True, False])
def test_it_chooses_neither_for_fixed_drafts_nor_for_grammars(adaptive: bool) -> None:
    target = SimulatedTarget(text=Text(vocab_size=4096))
    scheduler = make_scheduler(target, [Sure()], end_tokens=frozenset({0}))
    follows = SamplingParams(grammar=Grammar(GrammarKind.CHOICE, '["one answer, and no other"]'))
    drafting = {"drafter": "sure", "k_draft": 3, "adaptive": adaptive}
    served = serve(
        scheduler,
        make_request(8, 40, **drafting),
        make_request(8, 20, sampling=follows, **drafting),
    )
    drafts = {
        (draft.drafter, draft.adaptive) for result in served.results for draft in result.drafts
    }
    assert drafts == {("sure", adaptive), (GRAMMAR, False)}
