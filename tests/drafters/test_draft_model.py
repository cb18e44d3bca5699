"""Guesses by a smaller model: computed as if nothing had ever been rejected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.decoder import Decoder
from specops.drafters.base import NO_DRAFT
from specops.drafters.draft_model import DraftModelDrafter
from specops.request import SamplingParams
from specops.sampling import filtered_probs
from specops.session import open_session, share_threads
from tests.drafters.ask import counted, propose

RNG = np.random.default_rng(0)
VOCAB = 320


def test_guesses_its_own_greedy_continuation(draft_decoder: Decoder) -> None:
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
def test_goes_on_as_if_nothing_had_been_rejected(
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


def test_feeds_only_what_is_new(draft_decoder: Decoder) -> None:
    drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB)
    tokens = [5, 6, 7, 8]
    guesses = propose(drafter, tokens, 3).tokens
    with counted(draft_decoder) as fed:
        propose(drafter, [*tokens, *guesses, 9], 2)
    # The last guess was never fed, so two tokens are new; then one guess is fed for the second.
    assert fed == [2, 1]
    with counted(draft_decoder) as fed:
        propose(drafter, [*tokens, *guesses, 9, 300], 1)
    assert fed == [1]


@pytest.mark.parametrize("accepted", range(5))
def test_no_token_is_computed_twice(draft_decoder: Decoder, accepted: int) -> None:
    """Whatever part of the guesses stands: what is fed is what the cache does not hold."""
    drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB)
    tokens = [5, 6, 7, 8]
    for _ in range(4):
        guesses = propose(drafter, tokens, 4).tokens
        wrong = (guesses[accepted] + 1) % VOCAB if accepted < 4 else 9
        tokens = [*tokens, *guesses[:accepted], wrong]
        with counted(draft_decoder) as fed:
            propose(drafter, tokens, 1)
        assert fed == [2 if accepted == 4 else 1]


def test_stops_at_its_context(draft_decoder: Decoder) -> None:
    drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB)
    tokens = RNG.integers(1, VOCAB, 70).tolist()
    drafter.prefill(0, tokens)
    assert len(propose(drafter, tokens[:62], 8).tokens) == 3
    assert len(propose(drafter, tokens[:64], 8).tokens) == 1
    assert propose(drafter, tokens[:65], 8) is NO_DRAFT


def test_draws_from_the_distribution_that_it_reports(draft_decoder: Decoder) -> None:
    drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB + 5)
    draft = propose(drafter, [5, 6, 7], 4, sampling=SamplingParams(1.0, top_k=3))
    assert draft.probs is not None
    assert draft.probs.shape == (4, VOCAB + 5)
    assert np.allclose(draft.probs.sum(axis=-1), 1, atol=1e-5)
    assert all(draft.probs[index, token] > 0 for index, token in enumerate(draft.tokens))
    assert not draft.probs[:, VOCAB:].any()


@pytest.mark.parametrize(("like", "known"), [(0, 2), (2, 5)])
def test_a_new_sequence_goes_on_from_the_longest_common_beginning(
    draft_decoder: Decoder, like: int, known: int
) -> None:
    """Of its own row's last sequence, or of another row's, which keeps what it has."""
    drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB)
    prompt = [5, 6, 7, 8, 9, 10]
    expected = propose(drafter, prompt, 3, row=1)
    propose(drafter, [5, 6, 300], 4, row=0)
    propose(drafter, [*prompt[:5], 300], 4, row=2)
    held = draft_decoder.cache.lengths[2]
    drafter.start(0, prompt, like)
    assert draft_decoder.cache.lengths[0] == known
    assert drafter.backlog(0, len(prompt)) == len(prompt) - known
    with counted(draft_decoder) as fed:
        drafter.prefill(0, prompt)
    assert fed == [len(prompt) - known]
    assert propose(drafter, prompt, 3, row=0) == expected
    assert draft_decoder.cache.lengths[2] == held


PROMPT = [5, 6, 7, 8]


def own_probability(
    decoder: Decoder, tokens: list[int], guess: int, sampling: SamplingParams | None
) -> float:
    """What the draft gives to a guess after `tokens`."""
    logits = decoder.extend(2, tokens)[-1:].copy()
    decoder.cache.truncate(2, 0)
    return float(filtered_probs(logits, sampling or SamplingParams(1.0))[0, guess])


@pytest.mark.parametrize("sampling", [None, SamplingParams(0.7, top_k=20, top_p=0.9)])
def test_the_first_unsure_guess_is_the_last(
    draft_decoder: Decoder, sampling: SamplingParams | None
) -> None:
    """Up to there it makes the guesses that it would make anyway."""
    asked = sampling or SamplingParams()
    everything = propose(
        DraftModelDrafter(draft_decoder, vocab_size=VOCAB), PROMPT, 4, sampling=asked
    )
    own = [
        own_probability(draft_decoder, [*PROMPT, *everything.tokens[:position]], guess, sampling)
        for position, guess in enumerate(everything.tokens)
    ]
    lengths = set()
    for bound in (0.0, *(value + 1e-6 for value in own)):  # just more than one of them has
        draft_decoder.cache.truncate(0, 0)
        drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB, min_probability=bound)
        draft = propose(drafter, PROMPT, 4, sampling=asked)
        unsure = [position for position, value in enumerate(own) if value < bound]
        expected = min(4, unsure[0] + 1) if unsure else 4
        assert draft.tokens == everything.tokens[:expected]
        assert (draft.probs is None) == (sampling is None)
        if draft.probs is not None and everything.probs is not None:
            assert np.array_equal(draft.probs, everything.probs[:expected])
        lengths.add(expected)
    assert min(lengths) < 4  # the bound has cut something


def test_after_an_unsure_guess_no_pass_is_made(draft_decoder: Decoder) -> None:
    drafter = DraftModelDrafter(draft_decoder, vocab_size=VOCAB, min_probability=1.0)
    with counted(draft_decoder) as fed:
        assert len(propose(drafter, PROMPT, 4).tokens) == 1
        assert len(propose(drafter, [*PROMPT, 9], 4).tokens) == 1
    assert fed == [4, 1]
