"""Of two drafts the one that brings more tokens is taken; a lookup learns how right it is."""

import pytest

from specops.speculation.drafters.base import NO_DRAFT, Draft, better
from tests.simulated_target import Text
from tests.speculation.drafters.ask import propose
from tests.speculation.drafters.scripted import Scripted


def draft(tokens: str, *probabilities: float) -> Draft:
    return Draft(tuple(map(ord, tokens)), accept_probs=probabilities)


@pytest.mark.parametrize(
    ("one", "other", "tokens", "probabilities"),
    [
        (draft("abc", 0.4, 0.9, 0.9), draft("d", 0.9), "abc", (0.4, 0.9, 0.9)),  # 1.084 of 0.9
        (draft("abc", 0.3, 0.9, 0.9), draft("d", 0.9), "d", (0.9,)),  # 0.813
        (draft("abc", 0.4, 0.9, 0.9), draft("a", 0.7), "abc", (0.7, 0.9, 0.9)),  # both say a
        (draft("abc", 0.8, 0.2, 0.9), draft("ad", 0.7, 0.6), "ad", (0.8, 0.6)),
        (draft("ab", 0.5, 0.5), draft("ab", 0.4, 0.6), "ab", (0.5, 0.6)),
        (NO_DRAFT, draft("a", 0.1), "a", (0.1,)),
    ],
)
def test_the_better_draft_has_the_larger_sum_of_reaches(
    one: Draft, other: Draft, tokens: str, probabilities: tuple[float, ...]
) -> None:
    found = better(one, other)
    assert (found.tokens, found.accept_probs) == (tuple(map(ord, tokens)), probabilities)


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9])
def test_a_lookup_s_promises_become_true_whether_its_drafts_are_verified_or_not(
    right: float,
) -> None:
    lookup, text, tokens = Scripted(Text(), right), Text(), [5, 6]
    for _ in range(300):
        draft = propose(lookup, tokens, 3)
        tokens = [*tokens, *text.continuation(tokens, 1)]
    assert len(set(draft.accept_probs)) == 1  # all its tokens are alike
    assert draft.accept_probs[0] == pytest.approx(right, abs=0.1)
