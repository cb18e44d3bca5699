"""A model's logits by the service's own graph, kernels and KV cache, without an engine around.

What measures quality needs the logits of every token of a text. Output does not depend on how the
text is cut into passes, so these are the logits that the service would draw from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from bench.models import BenchModel
from specops.engine.graphs import Graph
from specops.runtime.batch import Batch
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kv_cache import KvCache, PrefixCache
from specops.runtime.model_runner import ModelRunner, cache_shape
from specops.runtime.session import Session, share_threads
from specops.system.cpus import available_threads

_PASS_TOKENS = 64  # [tokens, vocabulary] logits of a pass are held at once

Logits = npt.NDArray[np.float32]


class Model:
    """One sequence of the target at a time.

    `session` is of a graph as `load_graph` opens it.
    """

    def __init__(self, session: Session, kv_dtype: str, context: int) -> None:
        self.shape = cache_shape(session, kv_dtype)
        cache = KvCache(
            self.shape,
            num_blocks=-(-context // BLOCK_TOKENS),
            num_slots=1,
            context=context,
            reuse=PrefixCache.OFF,
        )
        self._runner = ModelRunner(session, cache, max_tokens=_PASS_TOKENS)

    def passes(self, tokens: Sequence[int]) -> Iterator[Logits]:
        """Logits of a text's tokens [S, V], pass by pass; each is valid until the next one."""
        cache = self._runner.cache
        cache.begin(0, tokens)
        for start in range(0, len(tokens), _PASS_TOKENS):
            part = tokens[start : start + _PASS_TOKENS]
            if not cache.reserve(0, start + len(part)):
                raise ValueError(f"{len(tokens)} tokens are more than {cache.context}")
            batch = Batch()
            batch.add(0, start, part, len(part))
            yield self._runner.forward(batch)
            cache.commit(0, tokens, start + len(part))
        cache.release(0)

    def __call__(self, tokens: Sequence[int]) -> Logits:
        """Logits of a text's tokens, [S, V]."""
        return np.concatenate([logits.copy() for logits in self.passes(tokens)])


def open_graph(model: BenchModel) -> Graph:
    """A model's graph on this process's threads."""
    share_threads(model.settings.threads or available_threads())
    return model.graph()
