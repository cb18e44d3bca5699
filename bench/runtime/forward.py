"""Logits of a text from the engine's model runner, and the divergence between two models' logits.

Measuring quality takes the logits of every token of a text. They do not depend on how the text is
cut into passes, so the service would sample from the same logits.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specops.runtime.batch import Batch
from specops.runtime.model_runner import ModelRunner

Logits = npt.NDArray[np.float32]
Logs = npt.NDArray[np.float64]


def passes(runner: ModelRunner, tokens: Sequence[int]) -> Iterator[Logits]:
    """Yield logits [S, V] of a text's tokens, computed in slot 0, valid until the next pass.

    Raises:
        ValueError: the cache is too small for the text.
    """
    cache, most = runner.cache, runner.max_tokens
    cache.allocate(0, tokens, share=False)  # a cached prefix has no logits
    for start in range(0, len(tokens), most):
        part = tokens[start : start + most]
        if not cache.reserve(0, start + len(part)):
            raise ValueError(f"{len(tokens)} tokens are more than {cache.context}")
        batch = Batch()
        batch.add(0, start, part, len(part))
        yield runner.forward(batch)
        cache.commit(0, tokens, start + len(part))
    cache.release(0)


class Divergence(NamedTuple):
    """For each position: KL in nats, and whether the most likely token differs."""

    kl: npt.NDArray[np.float64]  # [S]
    flipped: npt.NDArray[np.bool_]  # [S]


def divergence(p: Logs, q: Logs) -> Divergence:
    """KL(p || q) of each row of log-probabilities [S, V]."""
    kl = (np.exp(p) * (p - q)).sum(-1)
    return Divergence(np.maximum(kl, 0.0), p.argmax(-1) != q.argmax(-1))


def log_softmax(logits: Logits) -> Logs:
    """Log-probabilities [S, V] in double precision, from logits [S, V]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted
