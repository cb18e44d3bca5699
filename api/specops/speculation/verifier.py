"""Accepting and rejecting draft tokens so that the output is the target's own.

Greedy: a draft token is accepted where it equals the target's choice. Sampled: speculative sampling
(Leviathan, Kalman and Matias 2023, https://arxiv.org/abs/2211.17192, and Chen et al. 2023,
https://arxiv.org/abs/2302.01318): accept a token with probability min(1, target / draft), and
after a rejection draw from the residual max(0, target - draft). The output's distribution is
exactly the target's, whatever the draft proposes.

Sampled by noise: the target's token at a position follows from a seed and the position, and a draft
token is accepted if it equals that token. With a client's seed the text is the same with every
drafter and any number of draft tokens, including none (drafter-invariant speculative decoding:
Daliri, Musco and Suresh 2024, https://arxiv.org/abs/2408.07978), since the logits are bitwise equal
in any pass. A certain token is accepted as often as by speculative sampling: with its probability.
A drawn one is accepted less often. If the target's and the draft's distributions are `d` apart in
total variation, speculative sampling accepts with probability 1 - d; a draft drawn by the same
noise is accepted with at least (1 - d) / (1 + d), and one drawn by other noise only with the sum of
target * draft. A draft head always draws by noise: so it need not keep its distributions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from specops.request import SamplingParams
from specops.runtime.sampling import Floats, draw, draw_seeded, filtered_probs, likeliest


class Verdict(NamedTuple):
    """The number of accepted draft tokens, and the target's own next token."""

    accepted: int
    next_token: int


def verify(
    target_logits: Floats,
    draft_tokens: Sequence[int],
    draft_probs: Floats | None,
    *,
    sampling: SamplingParams,
    noise: int | None,
    rng: np.random.Generator,
    position: int,
) -> Verdict:
    """Accept draft tokens by the rule for the request's sampling.

    Without draft tokens this is plain decoding. Rows are filtered only as needed: filtering takes
    far longer than anything else here.

    Args:
        target_logits: [k + 1, V], row i conditioned on the first i draft tokens.
        draft_tokens: [k], from any source.
        draft_probs: see `verify_sampled`.
        sampling: the target's sampling parameters.
        noise: the seed of the request's noise; None: tokens are drawn by `rng`.
        rng: the request's random numbers.
        position: position of the first draft token in its sequence.

    Raises:
        NotFinite: a needed row's largest logit is not finite.
    """
    if sampling.temperature == 0:
        return compare(map(likeliest, target_logits), draft_tokens)

    def probs(row: int) -> Floats:
        filtered: Floats = filtered_probs(target_logits[row : row + 1], sampling)[0]
        return filtered

    if noise is not None:
        return verify_seeded(probs, draft_tokens, noise, position)
    return verify_sampled(probs, draft_tokens, draft_probs, rng)


def compare(choices: Iterable[int], draft_tokens: Sequence[int]) -> Verdict:
    """Accept the draft tokens [k] before the first that differs from the target's choice.

    The target's choices [k + 1] are read only as far as needed.

    Raises:
        ValueError: there are too few choices.
    """
    drafted = len(draft_tokens)
    for accepted, choice in enumerate(choices):
        if accepted == drafted or choice != draft_tokens[accepted]:
            return Verdict(accepted, choice)
    raise ValueError("there must be one more choice than draft tokens")


def verify_sampled(
    target_probs: Callable[[int], Floats],
    draft_tokens: Sequence[int],
    draft_probs: Floats | None,
    rng: np.random.Generator,
) -> Verdict:
    """Accept draft tokens so that every token follows the target's distribution.

    Args:
        target_probs: returns the distribution [V] of one of the k + 1 rows, filtered by the
            request's sampling parameters. Called for one row after another.
        draft_tokens: [k], drawn from `draft_probs`.
        draft_probs: [k, V], filtered the same way; None if the tokens were certain (a lookup puts
            all probability on one token).
        rng: the request's random numbers.
    """
    for position, token in enumerate(draft_tokens):
        draft_prob = 1.0 if draft_probs is None else float(draft_probs[position, token])
        probs = target_probs(position)
        if rng.random() * draft_prob < probs[token]:
            continue
        residual = probs.copy()
        if draft_probs is None:
            residual[token] = 0.0
        else:
            np.maximum(residual - draft_probs[position], 0.0, out=residual)
            if not residual.any():  # equal up to rounding: so was the rejection
                residual = probs
        return Verdict(position, draw(residual, rng))
    return Verdict(len(draft_tokens), draw(target_probs(len(draft_tokens)), rng))


def verify_seeded(
    target_probs: Callable[[int], Floats], draft_tokens: Sequence[int], seed: int, position: int
) -> Verdict:
    """Accept draft tokens as long as they equal the target's draws at their positions.

    Args:
        target_probs: see `verify_sampled`.
        draft_tokens: [k].
        seed: the noise's seed.
        position: position of the first draft token in its sequence.
    """
    drawn = (draw_seeded(target_probs(row), seed, position + row) for row in count())
    return compare(drawn, draft_tokens)
