"""The drafters that the means allow, and their rows when requests come and go."""

from __future__ import annotations

from specops.decoder import Decoder
from specops.drafters.registry import Means, make_drafters
from tests.drafters.ask import counted, propose

VOCAB = 320


def test_what_there_is_depends_on_the_means(draft_decoder: Decoder) -> None:
    assert list(make_drafters(Means(VOCAB))) == ["ngram"]
    assert list(make_drafters(Means(VOCAB, draft_decoder))) == ["draft", "ngram", "cascade"]
    shared = make_drafters(Means(VOCAB, shared_ngrams=10))
    assert list(shared) == ["ngram", "ngram_cache"]


def test_every_drafter_is_filed_under_its_own_name(draft_decoder: Decoder) -> None:
    drafters = make_drafters(Means(VOCAB, draft_decoder, shared_ngrams=10))
    assert all(drafter.name == name for name, drafter in drafters.items())


def test_a_row_that_all_drafters_start_anew_keeps_the_common_beginning(
    draft_decoder: Decoder,
) -> None:
    """The cascade shares its parts: they are told once, and what they keep is not forgotten."""
    drafters = make_drafters(Means(VOCAB, draft_decoder))
    tokens = [5, 6, 7, 8]
    expected = propose(drafters["cascade"], tokens, 3, row=1)
    for drafter in drafters.values():
        drafter.start(1, tokens, 1)
    assert draft_decoder.cache.lengths[1] == 4
    assert propose(drafters["cascade"], tokens, 3, row=1) == expected


def test_what_is_looked_up_runs_no_model(draft_decoder: Decoder) -> None:
    """And is what `propose` guesses wherever there is any."""
    drafters = make_drafters(Means(VOCAB, draft_decoder, shared_ngrams=10))
    assert {name for name, drafter in drafters.items() if drafter.runs_model} == {
        "draft",
        "cascade",
    }
    for tokens in ([5, 6, 7, 5, 6], [5, 6, 7, 8]):
        for row, drafter in enumerate((drafters["ngram_cache"], drafters["cascade"])):
            with counted(draft_decoder) as fed:
                found = drafter.look_up(row, tokens, 2)
            assert fed == []
            assert bool(found.tokens) == (tokens[-1] == 6)
            if found.tokens:
                assert propose(drafter, tokens, 2, row=row) == found
        for drafter in drafters.values():
            drafter.release(0)
            drafter.release(1)


def test_the_backlog_is_what_the_next_guess_has_to_feed(draft_decoder: Decoder) -> None:
    drafters = make_drafters(Means(VOCAB, draft_decoder))
    tokens = [5, 6, 7, 8, 9, 10]
    drafters["draft"].prefill(0, tokens[:2])
    for name, expected in {"ngram": 0, "draft": 4, "cascade": 4}.items():
        assert drafters[name].backlog(0, len(tokens)) == expected
    with counted(draft_decoder) as fed:
        propose(drafters["draft"], tokens, 1)
    assert fed == [4]
