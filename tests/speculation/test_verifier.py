"""Verification gives the target's own output: token by token, or in distribution."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from specops.request import SamplingParams
from specops.runtime.sampling import Floats, draw, draw_seeded, filtered_probs
from specops.speculation import verifier
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
    return verify_seeded(target.__getitem__, drafted, trial, 0)


@pytest.mark.parametrize("certain", [False, True], ids=["drawn drafts", "certain drafts"])
def test_sampled_output_follows_the_target(certain: bool) -> None:
    assert p_value(sampled, certain=certain) > 1e-3


@pytest.mark.parametrize("shared", [False, True], ids=["other noise", "the target's noise"])
def test_seeded_output_follows_the_target(shared: bool) -> None:
    assert p_value(seeded, seeded=shared) > 1e-3


def test_seeded_verdicts_are_the_targets_own_draws() -> None:
    """Whatever was drafted: what comes out is what the target draws at each position, alone."""
    target, _ = distributions(2)
    for seed in range(300):
        rng = np.random.default_rng(seed)
        own = [draw_seeded(item, seed, 40 + index) for index, item in enumerate(target)]
        drafted = rng.integers(0, VOCAB, 2).tolist()
        for draft in ([], drafted[:1], drafted, own[:1], own[:2], [own[0], drafted[1]]):
            verdict = verify_seeded(target.__getitem__, draft, seed, 40)
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


ROWS = np.random.default_rng(3).standard_normal((4, 500)).astype(np.float32) * 3
FILTERED = SamplingParams(0.8, top_k=40, top_p=0.9, min_p=0.01)


def test_without_a_draft_a_request_is_decoded_plainly() -> None:
    """Greedy without a random number, with a seed by seed and position, else by one number."""
    rng, other = np.random.default_rng(1), np.random.default_rng(1)
    for position in range(40):
        for row in ROWS:
            probs = filtered_probs(row[None], FILTERED)[0]
            for sampling, expected in (
                (SamplingParams(), int(row.argmax())),
                (replace(FILTERED, seed=4), draw_seeded(probs, 4, position)),
                (FILTERED, draw(probs, other)),
            ):
                found = verify(
                    row[None],
                    [],
                    None,
                    sampling=sampling,
                    noise=sampling.seed,
                    rng=rng,
                    position=position,
                )
                assert found == Verdict(0, expected)
    assert rng.random() == other.random()


@pytest.mark.parametrize(("seed", "drawn"), [(7, False), (None, False), (None, True)])
def test_rows_are_filtered_as_far_as_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, seed: int | None, drawn: bool
) -> None:
    """The verdict is that over all rows; to filter one of 49,000 logits takes 90 microseconds."""
    rng, cut = np.random.default_rng(1), 0
    draft = rng.dirichlet(np.ones(500), 3).astype(np.float32) if drawn else None
    whole = filtered_probs(ROWS, FILTERED)
    asked: list[Floats] = []

    def filtered(logits: Floats, params: SamplingParams) -> Floats:
        asked.append(logits)
        return filtered_probs(logits, params)

    monkeypatch.setattr(verifier, "filtered_probs", filtered)
    for trial in range(60):
        one, other = np.random.default_rng(trial), np.random.default_rng(trial)
        tokens = [draw(row, rng) for row in (whole[:3] if draft is None else draft)]
        asked.clear()
        found = verify(ROWS, tokens, draft, sampling=FILTERED, noise=seed, rng=one, position=trial)
        if seed is None:
            assert found == verify_sampled(whole.__getitem__, tokens, draft, other)
        else:
            assert found == verify_seeded(whole.__getitem__, tokens, seed, trial)
        assert np.array_equal(np.concatenate(asked), ROWS[: found.accepted + 1])
        assert one.random() == other.random()
        cut += len(asked) < 4
    assert cut > 10
