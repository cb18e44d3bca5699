"""Accepting and rejecting guesses so that the output is the target's own.

Greedy: a guess is accepted where it equals the target's choice. Sampled: speculative sampling
(Leviathan, Kalman and Matias 2023, https://arxiv.org/abs/2211.17192, and Chen et al. 2023,
https://arxiv.org/abs/2302.01318): accept a guess with probability min(1, target / draft), and
after a rejection draw from what the target has more of than the draft. The output's distribution
is exactly the target's, whatever the draft guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specops.sampling import Floats, draw


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many guesses stand, and the target's own token that follows them."""

    accepted: int
    next_token: int


def verify_greedy(target_logits: Floats, draft_tokens: Sequence[int]) -> Verdict:
    """Accept the guesses that equal the target's most probable tokens.

    Args:
        target_logits: [k + 1, V], position i conditioned on the first i guesses.
        draft_tokens: [k].
    """
    choices = target_logits.argmax(axis=-1).tolist()
    accepted = 0
    while accepted < len(draft_tokens) and choices[accepted] == draft_tokens[accepted]:
        accepted += 1
    return Verdict(accepted, choices[accepted])


def verify_sampled(
    target_probs: Floats,
    draft_tokens: Sequence[int],
    draft_probs: Floats | None,
    rng: np.random.Generator,
) -> Verdict:
    """Accept guesses so that every token is distributed as the target's.

    Args:
        target_probs: [k + 1, V], filtered by the request's sampling parameters.
        draft_tokens: [k], drawn from `draft_probs`.
        draft_probs: [k, V], filtered the same way; None where the guesses were certain (an
            n-gram's distribution has all its mass on one token).
        rng: the request's random numbers.
    """
    for position, token in enumerate(draft_tokens):
        draft_prob = 1.0 if draft_probs is None else float(draft_probs[position, token])
        if rng.random() * draft_prob < target_probs[position, token]:
            continue
        residual = target_probs[position].copy()
        if draft_probs is None:
            residual[token] = 0.0
        else:
            np.maximum(residual - draft_probs[position], 0.0, out=residual)
            if not residual.any():  # equal but for rounding: the rejection was rounding, too
                residual = target_probs[position]
        return Verdict(position, draw(residual, rng))
    return Verdict(len(draft_tokens), draw(target_probs[len(draft_tokens)], rng))
