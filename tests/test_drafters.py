"""Guesses: looked up where the text repeats, computed as if nothing had ever been rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.decoder import Decoder
from specops.drafters.base import NO_DRAFT, Draft, Drafter
from specops.drafters.draft_model import DraftModelDrafter
from specops.drafters.ngram import LONGEST, SHORTEST, NgramDrafter
from specops.request import SamplingParams
from specops.session import open_session, share_threads

GREEDY = SamplingParams()
RNG = np.random.default_rng(0)
VOCAB = 320


def propose(
    drafter: Drafter, tokens: list[int], count: int, row: int = 0, sampling: SamplingParams = GREEDY
) -> Draft:
    return drafter.propose(row, tokens, count, sampling, np.random.default_rng(1))


def test_ngram_continues_the_latest_match() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 3, 8, 7, 1, 2, 3]
    assert propose(NgramDrafter(), tokens, 3).tokens == (8, 7, 1)


def test_ngram_prefers_the_longest_match() -> None:
    tokens = [5, 1, 2, 3, 9, 0, 2, 3, 8, 5, 1, 2, 3]
    assert propose(NgramDrafter(), tokens, 1).tokens == (9,)


def test_ngram_continues_a_period_beyond_the_end() -> None:
    assert propose(NgramDrafter(), [1, 2, 3, 1, 2, 3], 7).tokens == (1, 2, 3, 1, 2, 3, 1)
    assert propose(NgramDrafter(), [4, 4, 4], 4).tokens == (4, 4, 4, 4)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4, 5]])
def test_ngram_without_a_match_has_no_guess(tokens: list[int]) -> None:
    assert propose(NgramDrafter(), tokens, 4) is NO_DRAFT


def scan(tokens: list[int]) -> int | None:
    """The plain way: look for the longest suffix from the end backwards."""
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        suffix = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                return tokens[end]
    return None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 60))
def test_ngram_grown_step_by_step_finds_what_a_scan_finds(tokens: list[int], first: int) -> None:
    drafter = NgramDrafter()
    for length in range(min(first, len(tokens)), len(tokens) + 1):
        draft = propose(drafter, tokens[:length], 1)
        assert (draft.tokens or (None,))[0] == scan(tokens[:length])


def test_ngram_rows_move_and_are_forgotten() -> None:
    drafter = NgramDrafter()
    propose(drafter, [1, 2, 3], 1, row=2)
    drafter.move(2, 0)
    assert propose(drafter, [1, 2, 3, 1, 2], 1, row=0).tokens == (3,)
    drafter.release(0)
    assert propose(drafter, [7, 8], 1, row=0) is NO_DRAFT


@pytest.fixture
def draft_decoder(tiny_pair: Path) -> Decoder:
    share_threads(2)
    graph = tiny_pair / "draft" / "onnx" / "fp32" / "model.onnx"
    return Decoder(open_session(graph), rows=3, capacity=64, max_width=8)


def test_draft_model_guesses_its_own_greedy_continuation(draft_decoder: Decoder) -> None:
    tokens = [5, 6, 7, 8]
    guesses = propose(DraftModelDrafter(draft_decoder, vocab_size=VOCAB), tokens, 4).tokens
    draft_decoder.cache.truncate(2, 0)
    for guess in guesses:
        logits = draft_decoder.extend(2, tokens)[-1]
        assert int(logits.argmax()) == guess
        draft_decoder.cache.truncate(2, 0)
        tokens = [*tokens, guess]


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, VOCAB - 1), st.integers(1, 4)),
        min_size=1,
        max_size=5,
    )
)
def test_draft_model_goes_on_as_if_nothing_had_been_rejected(
    tiny_pair: Path, jumps: list[tuple[int, int, int]]
) -> None:
    """After any accepted part and any correction its guesses are those of a fresh drafter."""
    share_threads(2)
    graph = tiny_pair / "draft" / "onnx" / "fp32" / "model.onnx"
    decoder = Decoder(open_session(graph), rows=2, capacity=64, max_width=8)
    drafter = DraftModelDrafter(decoder, vocab_size=VOCAB)
    drafter.prefill(0, [5, 6, 7])
    tokens = [5, 6, 7, 8]
    guesses: tuple[int, ...] = ()
    for accepted, correction, count in jumps:
        tokens += [*guesses[:accepted], correction]
        guesses = propose(drafter, tokens, count).tokens
        assert decoder.cache.lengths[0] == len(tokens) + count - 1
        fresh = propose(drafter, tokens, count, row=1).tokens
        drafter.release(1)
        assert guesses == fresh


def test_draft_model_feeds_only_what_is_new(draft_decoder: Decoder) -> None:
    drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB)
    tokens = [5, 6, 7, 8]
    guesses = propose(drafter, tokens, 3).tokens
    fed: list[int] = []
    extend = draft_decoder.extend

    def counting(row: int, new: list[int], *, logits: int) -> object:
        fed.append(len(new))
        return extend(row, new, logits=logits)

    draft_decoder.extend = counting  # type: ignore[method-assign, assignment]
    propose(drafter, [*tokens, *guesses, 9], 2)
    # The last guess was never fed, so two tokens are new; then one guess is fed for the second.
    assert fed == [2, 1]
    fed.clear()
    propose(drafter, [*tokens, *guesses, 9, 300], 1)
    assert fed == [1]


def test_draft_model_stops_at_its_context(draft_decoder: Decoder) -> None:
    drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB)
    tokens = RNG.integers(1, VOCAB, 70).tolist()
    drafter.prefill(0, tokens)
    assert len(propose(drafter, tokens[:62], 8).tokens) == 3
    assert len(propose(drafter, tokens[:64], 8).tokens) == 1
    assert propose(drafter, tokens[:65], 8) is NO_DRAFT


def test_draft_model_draws_from_the_distribution_that_it_reports(draft_decoder: Decoder) -> None:
    drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB + 5)
    draft = propose(drafter, [5, 6, 7], 4, sampling=SamplingParams(1.0, top_k=3))
    assert draft.probs is not None
    assert draft.probs.shape == (4, VOCAB + 5)
    assert np.allclose(draft.probs.sum(axis=-1), 1, atol=1e-5)
    assert all(draft.probs[index, token] > 0 for index, token in enumerate(draft.tokens))
    assert not draft.probs[:, VOCAB:].any()


def test_draft_model_rows_move(draft_decoder: Decoder) -> None:
    drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB)
    tokens = [5, 6, 7, 8]
    expected = propose(drafter, tokens, 3, row=2)
    drafter.move(2, 0)
    assert propose(drafter, tokens, 3, row=0) == expected
    assert draft_decoder.cache.lengths[2] == 0
