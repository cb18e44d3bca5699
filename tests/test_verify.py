"""Verification gives the target's own output: token by token, or in distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chisquare

from specops.sampling import Floats, draw
from specops.verify import Verdict, verify_greedy, verify_sampled

VOCAB = 6
DRAWS = 30_000
Rule = Callable[[Floats, list[int], Floats | None, np.random.Generator], Verdict]


def logits_for(choices: list[int]) -> Floats:
    logits = np.zeros((len(choices), VOCAB), np.float32)
    logits[np.arange(len(choices)), choices] = 1
    return logits


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
    assert verify_greedy(logits_for(choices), draft) == Verdict(accepted, following)


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


def p_value(rule: Rule, *, certain: bool) -> float:
    """How well the first two tokens follow the target: chi-square over all pairs of tokens.

    The target's second distribution is the same whatever the first token, so that the expected
    share of a pair is a product.
    """
    target, draft = distributions(5)
    rng = np.random.default_rng(11)
    counts = np.zeros((VOCAB, VOCAB))
    for _ in range(DRAWS):
        guesses = [draw(draft[0], rng), draw(draft[1], rng)]
        verdict = rule(target, guesses, None if certain else draft, rng)
        tokens = [*guesses[: verdict.accepted], verdict.next_token]
        if len(tokens) == 1:  # the next step would draw the second
            tokens.append(draw(target[1], rng))
        counts[tokens[0], tokens[1]] += 1
    expected = np.outer(target[0], target[1]) * DRAWS
    assert not counts[expected == 0].any()
    seen = expected > 0
    ratio = counts[seen].sum() / expected[seen].sum()
    return float(chisquare(counts[seen], expected[seen] * ratio).pvalue)


@pytest.mark.parametrize("certain", [False, True], ids=["drawn guesses", "certain guesses"])
def test_sampled_output_follows_the_target(certain: bool) -> None:
    assert p_value(verify_sampled, certain=certain) > 1e-3


def accept_too_often(
    target: Floats, guesses: list[int], draft: Floats | None, rng: np.random.Generator
) -> Verdict:
    """Wrong: accepts whatever the target finds possible."""
    for position, token in enumerate(guesses):
        if target[position, token] == 0:
            return Verdict(position, draw(target[position], rng))
    return Verdict(len(guesses), draw(target[len(guesses)], rng))


def no_residual(
    target: Floats, guesses: list[int], draft: Floats | None, rng: np.random.Generator
) -> Verdict:
    """Wrong: draws from the target after a rejection, instead of from the residual."""
    verdict = verify_sampled(target, guesses, draft, rng)
    if verdict.accepted == len(guesses):
        return verdict
    return Verdict(verdict.accepted, draw(target[verdict.accepted], rng))


@pytest.mark.parametrize("rule", [accept_too_often, no_residual])
@pytest.mark.parametrize("certain", [False, True], ids=["drawn guesses", "certain guesses"])
def test_the_distribution_test_notices_wrong_rules(rule: Rule, certain: bool) -> None:
    assert p_value(rule, certain=certain) < 1e-6


def test_equal_distributions_accept_everything() -> None:
    target, _ = distributions(2)
    rng = np.random.default_rng(0)
    for _ in range(500):
        guesses = [draw(target[0], rng), draw(target[1], rng)]
        assert verify_sampled(target, guesses, target[:2], rng).accepted == 2


def test_a_token_that_the_target_excludes_is_never_accepted() -> None:
    target, _ = distributions(2)
    rng = np.random.default_rng(0)
    assert all(verify_sampled(target, [0, 0], None, rng).accepted == 0 for _ in range(200))
