"""The first drafter that has a guess is asked, and says that it was it."""

from __future__ import annotations

from specops.decoder import Decoder
from specops.drafters.base import NO_DRAFT, Draft
from specops.drafters.cascade import CascadeDrafter
from specops.drafters.draft_model import DraftModelDrafter
from specops.drafters.ngram import NgramDrafter
from specops.drafters.ngram_cache import NgramCacheDrafter
from tests.drafters.ask import counted, propose

VOCAB = 320
REPEATING = [5, 6, 7, 5, 6]
FRESH = [5, 6, 7, 8]


def make(decoder: Decoder) -> tuple[CascadeDrafter, DraftModelDrafter]:
    draft = DraftModelDrafter(decoder, vocab_size=VOCAB)
    return CascadeDrafter([NgramDrafter(), draft]), draft


def test_where_the_text_repeats_the_draft_model_is_not_run(draft_decoder: Decoder) -> None:
    cascade, _ = make(draft_decoder)
    with counted(draft_decoder) as fed:
        draft = propose(cascade, REPEATING, 2)
    assert draft == Draft((7, 5), origin="ngram", match_length=2)
    assert fed == []


def test_elsewhere_the_draft_model_guesses_what_it_would_alone(draft_decoder: Decoder) -> None:
    cascade, draft = make(draft_decoder)
    found = propose(cascade, FRESH, 3)
    assert found.origin == "draft"
    assert found.tokens == propose(draft, FRESH, 3, row=1).tokens


def test_the_draft_model_catches_up_on_other_drafters_guesses(draft_decoder: Decoder) -> None:
    """It feeds what it has not seen, once, and then guesses as if it had always been asked."""
    cascade, draft = make(draft_decoder)
    cascade.prefill(0, FRESH[:3])
    guesses = propose(cascade, FRESH, 4).tokens  # the cache now holds 3 of them
    tokens = [*FRESH, *guesses[:2], 300]
    for grown in ([*tokens, 5, 6], [*tokens, 5, 6, 7, 5, 6]):  # the n-gram drafter's turn
        assert propose(cascade, grown, 2).origin == "ngram"
    tokens = [*tokens, 5, 6, 7, 5, 6, 301]
    with counted(draft_decoder) as fed:
        found = propose(cascade, tokens, 1)
    assert fed == [7]  # 300 and all after it
    assert found.origin == "draft"
    assert found.tokens == propose(draft, tokens, 1, row=1).tokens


def test_a_parts_own_attribution_is_kept() -> None:
    cache = NgramCacheDrafter(NgramDrafter(), entries=10, order=2)
    cascade = CascadeDrafter([cache])
    assert propose(cascade, REPEATING, 1).origin == "ngram"
    assert propose(cascade, [9, 6, 7], 1, row=1).origin == "ngram_cache"


def test_when_nobody_has_a_guess_neither_has_the_cascade() -> None:
    assert propose(CascadeDrafter([NgramDrafter(), NgramDrafter()]), FRESH, 2) is NO_DRAFT


def test_a_lookup_in_vain_is_told_from_a_model_that_does_not_look(draft_decoder: Decoder) -> None:
    cascade, draft = make(draft_decoder)
    assert cascade.look_up(0, FRESH, 2) == Draft(origin="ngram")
    assert CascadeDrafter([draft]).look_up(0, FRESH, 2) is NO_DRAFT
