"""Runs a graph as the service does: prepacked for this processor, over a KV cache in blocks."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specops.models.graph.prepack import prepack
from specops.models.graph.weight_cache import graph_key
from specops.runtime.batch import Batch
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.block_pool import ROLLBACK
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.model_runner import ModelRunner, cache_shape
from specops.runtime.session import open_session

Float = NDArray[np.float32]


def prepared(graph: Path, cache_dir: Path, states: Sequence[int] = ()) -> Path:
    """Return the form of an exported graph that the engine runs, made in this process."""
    made = cache_dir / f"{'-'.join(graph.parts[-4:-1])}-{graph_key(graph, states)}" / graph.name
    if not made.exists():
        made.parent.mkdir(parents=True)
        prepack(graph, made, states)
    return made


class Passes:
    """A model with a few empty slots and without a prefix cache."""

    def __init__(
        self, graph: Path, *, slots: int = 3, context: int = 256, dtype: str = "fp32"
    ) -> None:
        """`graph` is a prepared one."""
        session = open_session(graph)
        blocks = slots * math.ceil(context / BLOCK_TOKENS)
        self.cache = KvCache(
            cache_shape(session, dtype),
            num_blocks=blocks,
            num_slots=slots,
            context=context,
            reuse=PrefixSharing.OFF,
        )
        self.runner = ModelRunner(session, self.cache, max_tokens=slots * context)
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        for slot in range(slots):
            self.cache.allocate(slot, [0])

    def step(self, slot: int, tokens: Sequence[int], *, num_logits: int | None = None) -> Float:
        """Run `tokens` in one slot; return the last tokens' logits [num_logits, vocabulary]."""
        return self.together({slot: tokens}, num_logits=num_logits)[slot]

    def together(
        self, tokens: Mapping[int, Sequence[int]], *, num_logits: int | None = None
    ) -> dict[int, Float]:
        """Run several slots in one pass; return each slot's logits, all if `num_logits` is None."""
        batch = Batch()
        for slot, new in tokens.items():
            held = self._tokens[slot]
            assert self.cache.reserve(slot, len(held) + len(new))
            rows = len(new) if num_logits is None else num_logits
            end = len(held) + len(new)
            batch.add(slot, len(held), list(new), rows, max(0, end - ROLLBACK))
        logits = self.runner.forward(batch).copy()
        found, start = {}, 0
        for span in batch.spans:
            self._tokens[span.slot].extend(span.tokens)
            found[span.slot] = logits[start : start + span.num_logits]
            start += span.num_logits
        return found

    def rewind(self, slot: int, length: int) -> None:
        """Keep only a slot's first `length` tokens, of models with states 0 or all but a few."""
        del self._tokens[slot][length:]


def random_chunks(tokens: Sequence[int], seed: int, longest: int = 64) -> list[Sequence[int]]:
    """Cut the tokens into pieces of 1 to `longest`."""
    rng = np.random.default_rng(seed)
    pieces, start = [], 0
    while start < len(tokens):
        width = int(rng.integers(1, longest + 1))
        pieces.append(tokens[start : start + width])
        start += width
    return pieces
