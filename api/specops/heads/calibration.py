"""How sure a head is, and how often it is right then: Platt's two numbers for each guess.

(Platt 1999, Probabilistic outputs for support vector machines.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from specops.heads.examples import Examples
from specops.heads.network import HeadNetwork
from specops.heads.training import guesses

_EDGE = 1e-6  # as the drafter has it: speculation/drafters/head.py
_STEPS = 50


def calibrate(network: HeadNetwork, examples: Examples) -> tuple[tuple[float, float], ...]:
    """Factor and summand of the first guess's logits, and of the second's where the first is right.

    Args:
        examples: that it was not trained on.
    """
    sure, right = guesses(network, examples)
    first = right[:, 0]
    return _fit(sure[:, 0], first), _fit(sure[first, 1], right[first, 1])


def _fit(sure: Tensor, right: Tensor) -> tuple[float, float]:
    """Fit sigmoid(factor * logit(sure) + summand) [n] to what was right [n]; identity for n = 0."""
    line = torch.tensor([1.0, 0.0], requires_grad=True)
    if len(sure):
        logits = torch.logit(sure, _EDGE)
        optimizer = torch.optim.LBFGS([line], max_iter=_STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            # The small term keeps a handful of examples, all of them right, within bounds.
            found = functional.binary_cross_entropy_with_logits(
                line[0] * logits + line[1], right.float()
            )
            found = found + (line - torch.tensor([1.0, 0.0])).square().sum() / len(sure)
            found.backward()
            return found

        optimizer.step(loss)
    factor, summand = line.tolist()
    return factor, summand
