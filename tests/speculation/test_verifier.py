"""Verification gives the target's own output: token by token, or in distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chisquare

from specops.request import SamplingParams
from specops.runtime.sampling import Floats, draw, draw_seeded, filtered_probs, next_token
from specops.speculation.verifier import (
    Verdict,
    compare,
    verify,
    verify_sampled,
    verify_seeded,
)

VOCAB = 6
DRAWS = 8_000
# What a rule is tried with: target [k + 1, V], draft tokens, draft [k, V], random numbers, trial.
Rule = Callable[[Floats, list[int], Floats | None, np.random.Generator, int], Verdict]


@pytest.mark.parametrize(
    ("choices", "draft", "accepted", "following"),
    [
        ([3, 1, 2], [3, 1], 2, 2),
        ([3, 1, 2], [3, 4], 1, 1),
        ([3, 1, 2], [0, 1], 0, 3),
        ([3], [], 0, 3),
    ],
)
def test_greedy_accepts_up_to_the_first_difference(
    choices: list[int], draft: list[int], accepted: int, following: int
) -> None:
    assert compare(choices, draft) == Verdict(accepted, following)


def distributions(seed: int) -> tuple[Floats, Floats]:
    """A target [3, V] and a draft [2, V] that disagree, each with a token of probability 0."""
    rng = np.random.default_rng(seed)
    target = rng.dirichlet(np.ones(VOCAB), 3).astype(np.float32)
    draft = rng.dirichlet(np.ones(VOCAB), 2).astype(np.float32)
    target[:, 0] = 0
    draft[:, 1] = 0
    return (
        target / target.sum(axis=-1, keepdims=True),
        draft / draft.sum(axis=-1, keepdims=True),
    )


def p_value(rule: Rule, *, certain: bool = False, seeded: bool = False) -> float:
    """How well the first two tokens follow the target: chi-square over all pairs of tokens.

    The target's second distribution is the same whatever the first token, so that the expected
    share of a pair is a product.

    Args:
        rule: gets draft tokens that were drawn from the draft's distributions.
        certain: it is not told of these.
        seeded: the draft tokens, and the token after them, are drawn by the trial's noise.
    """
    target, draft = distributions(5)
    rng = np.random.default_rng(11)
    counts = np.zeros((VOCAB, VOCAB))
    for trial in range(DRAWS):

        def drawn(probs: Floats, position: int, seed: int = trial) -> int:
            return draw_seeded(probs, seed, position) if seeded else draw(probs, rng)

        drafted = [drawn(draft[0], 0), drawn(draft[1], 1)]
        verdict = rule(target, drafted, None if certain else draft, rng, trial)
        tokens = [*drafted[: verdict.accepted], verdict.next_token]
        if len(tokens) == 1:  # the next step would draw the second
            tokens.append(drawn(target[1], 1))
        counts[tokens[0], tokens[1]] += 1
    expected = np.outer(target[0], target[1]).astype(np.float64) * DRAWS
    assert not counts[expected == 0].any()
    seen = expected > 0
    ratio = counts[seen].sum() / expected[seen].sum()
    return float(chisquare(counts[seen], expected[seen] * ratio).pvalue)


def sampled(
    target: Floats,
    drafted: list[int],
    draft: Floats | None,
    rng: np.random.Generator,
    trial: int,
) -> Verdict:
    return verify_sampled(target.__getitem__, drafted, draft, rng)


def seeded(
    target: Floats,
    drafted: list[int],
    draft: Floats | None,
    rng: np.random.Generator,
    trial: int,
) -> Verdict:
    return verify_seeded(as_logits(target), drafted, SamplingParams(1.0), trial, 0)


def as_logits(probs: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        logits: Floats = np.log(probs)
    return logits


@pytest.mark.parametrize("certain", [False, True], ids=["drawn drafts", "certain drafts"])
def test_sampled_output_follows_the_target(certain: bool) -> None:
    assert p_value(sampled, certain=certain) > 1e-3


@pytest.mark.parametrize("shared", [False, True], ids=["other noise", "the target's noise"])
def test_seeded_output_follows_the_target(shared: bool) -> None:
    assert p_value(seeded, seeded=shared) > 1e-3


def test_seeded_verdicts_are_the_targets_own_draws() -> None:
    """Whatever was drafted: what comes out is what the target draws at each position, alone."""
    logits = as_logits(distributions(2)[0])
    for seed in range(300):
        sampling = SamplingParams(1.0, seed=seed)
        rng = np.random.default_rng(seed)
        own = [next_token(item, sampling, rng, 40 + index) for index, item in enumerate(logits)]
        drafted = rng.integers(0, VOCAB, 2).tolist()
        for draft in ([], drafted[:1], drafted, own[:1], own[:2], [own[0], drafted[1]]):
            verdict = verify_seeded(logits[: len(draft) + 1], draft, sampling, seed, 40)
            tokens = [*draft[: verdict.accepted], verdict.next_token]
            assert tokens == own[: len(tokens)]
            assert len(tokens) == len(draft) + 1 or draft[verdict.accepted] != tokens[-1]


def test_equal_distributions_accept_everything() -> None:
    target, _ = distributions(2)
    rng = np.random.default_rng(0)
    for _ in range(500):
        drafted = [draw(target[0], rng), draw(target[1], rng)]
        assert verify_sampled(target.__getitem__, drafted, target[:2], rng).accepted == 2


def test_a_token_that_the_target_excludes_is_never_accepted() -> None:
    target, _ = distributions(2)
    rng = np.random.default_rng(0)
    assert all(
        verify_sampled(target.__getitem__, [0, 0], None, rng).accepted == 0 for _ in range(200)
    )


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(1.0, top_k=3, seed=4), SamplingParams(1.0, top_k=3)],
    ids=["greedy", "seeded", "sampled"],
)
def test_the_rule_follows_from_how_a_request_samples(sampling: SamplingParams) -> None:
    """Without a draft it is the token that plain decoding chooses from the same random numbers."""
    logits = as_logits(distributions(3)[0])
    for trial in range(40):
        rng, other = np.random.default_rng(trial), np.random.default_rng(trial)
        verdict = verify(logits[:1], [], None, sampling=sampling, rng=rng, position=9 + trial)
        assert verdict == Verdict(0, next_token(logits[0], sampling, other, 9 + trial))
        drafted = [verdict.next_token, 2]
        verdict = verify(logits, drafted, None, sampling=sampling, rng=rng, position=9 + trial)
        assert sampling == SamplingParams(1.0, top_k=3) or verdict.accepted >= 1


@pytest.mark.parametrize("drawn", [False, True])
def test_no_row_behind_the_first_rejected_token_is_filtered(drawn: bool) -> None:
    """To filter a row of 49,000 logits takes 90 microseconds, to judge its token none."""
    asked: list[int] = []
    target, draft = distributions(3)

    def probs(row: int) -> Floats:
        asked.append(row)
        return target[row]

    rng, counted = np.random.default_rng(1), 0
    for _ in range(200):
        asked.clear()
        tokens = [draw(draft[0], rng), draw(draft[1], rng)]
        verdict = verify_sampled(probs, tokens, draft if drawn else None, rng)
        assert asked == list(range(verdict.accepted + 1))
        counted += len(asked) < 3
    assert counted > 20


@pytest.mark.parametrize("seed", range(20))
def test_row_by_row_it_is_what_all_rows_at_once_were(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((4, 500)).astype(np.float32) * 3
    sampling = SamplingParams(0.8, top_k=40, top_p=0.9, min_p=0.01)
    draft = rng.dirichlet(np.ones(500), 3).astype(np.float32)
    tokens = [int(item) for item in logits[:3].argmax(axis=-1)]
    whole = filtered_probs(logits, sampling)
    for probs in (None, draft):
        one, other = np.random.default_rng(seed), np.random.default_rng(seed)
        found = verify(logits, tokens, probs, sampling=sampling, rng=one, position=0)
        assert found == verify_sampled(whole.__getitem__, tokens, probs, other)
        assert one.random() == other.random()
