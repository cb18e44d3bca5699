"""A target without a model: its passes take what those of the TinyLlama shape take, on a clock
that only they move forward, and it always says the same token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specops.config import Settings
from specops.controller import Controller
from specops.costs import CostCurve
from specops.kv_cache import CacheShape, KvCache
from specops.rows import PrefixCache
from specops.scheduler import Scheduler
from specops.tokenizer import Tokenizer
from specops.waiting import Waiting

SHAPE = CacheShape(layers=1, kv_heads=1, head_dim=1, dtype=np.dtype(np.float32))
DEMO = Settings().models_dir / "demo"
VOCAB = 32
SAID = 5
# Seconds on two cores, as measured: 1 row of 1 to 9 tokens, and 1 to 8 rows of a token.
VERIFY = [0.0144, 0.0182, 0.0251, 0.0307, 0.0365, 0.0424, 0.0484, 0.0544, 0.0604]
DECODE = [0.0144, 0.0204, 0.0266, 0.0328, 0.0392, 0.0455, 0.0518, 0.0582]
# A prompt's, through its 8-bit weights: a pass, a token of it, and each token before that one.
_READ, _TOKEN, _PAIR = 0.043, 0.0029, 0.0000013


class SimulatedTarget:
    """Stands in for `Decoder`.

    Args:
        rows: at most 8.
        capacity: tokens per row.
        slowness: how many times longer than expected passes take.
        scatter: a pass takes up to this share more or less.
    """

    def __init__(
        self, *, rows: int, capacity: int, slowness: float = 1.0, scatter: float = 0.0
    ) -> None:
        self.cache = KvCache(SHAPE, rows=rows, capacity=capacity)
        self.one_graph = True
        self.now = 0.0
        self._slowness = slowness
        self._scatter = scatter
        self._rng = np.random.default_rng(0)
        self._logits = np.zeros((capacity, VOCAB), np.float32)
        self._logits[:, SAID] = 1

    def prefill(self, row: int, tokens: Sequence[int], *, align: int = 1) -> np.ndarray:
        """A chunk of a prompt."""
        width, before = len(tokens), self.cache.lengths[row]
        self._pass(_READ + width * (_TOKEN + (before + width / 2) * _PAIR))
        self.cache.lengths[row] += width
        return self._logits[:1]

    def decode(self, first_row: int, tokens: Sequence[int]) -> np.ndarray:
        """A token for each of some rows."""
        for row in range(first_row, first_row + len(tokens)):
            self.cache.lengths[row] += 1
        self._pass(DECODE[len(tokens) - 1])
        return self._logits[: len(tokens)]

    def _pass(self, seconds: float) -> None:
        self.now += seconds * self._slowness * (1 + self._scatter * self._rng.uniform(-1, 1))


def make_scheduler(
    target: SimulatedTarget,
    *,
    longest_pause: float = 0.25,
    prefix_cache: PrefixCache = PrefixCache.CLIENT,
    waiting: Waiting | None = None,
) -> Scheduler:
    """A scheduler that measures time by the target's clock; the tokenizer is the demo pair's."""
    return Scheduler(
        target,  # type: ignore[arg-type]
        {},
        Controller(CostCurve(VERIFY, DECODE[: target.cache.rows]), 8),
        Tokenizer.load(DEMO / "target"),
        end_tokens=frozenset(),
        prefill_chunk=128,
        exact_align=2,
        longest_pause=longest_pause,
        prefix_cache=prefix_cache,
        waiting=waiting,
        clock=lambda: target.now,
    )
