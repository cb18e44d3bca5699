"""Our side of the comparison: the model runner that the service would load with `SPECOPS_*`.

The engine is loaded whole and its model runner taken out: tiles, read ahead, threads, KV cache and
the tokens of a prompt's passes are the service's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import onnxruntime

from bench.peers.protocol import Pass, prompt, serve
from bench.runtime.forward import passes
from specops.config import Settings
from specops.engine.engine import Engine
from specops.runtime.batch import Batch


class OurSide:
    """The engine's model runner; a row is a slot of its KV cache."""

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """See `protocol.Side`."""
        settings = Settings.from_env()
        engine = Engine.load(settings)
        said = (settings.target, engine.info.threads, settings.slots, settings.context)
        if said != (model, threads, rows, capacity):
            raise ValueError(f"the environment's settings are {said}")
        self._runner = engine.scheduler.target
        self._cache = self._runner.cache
        self._held: list[list[int]] = [[] for _ in range(rows)]  # tokens of each slot
        self._begun: set[int] = set()
        self._last: list[float] = []
        return f"onnxruntime {onnxruntime.__version__}"

    def hold(self, rows: int, length: int) -> None:
        """See `protocol.Side`."""
        ids = prompt(length, self._runner.vocab_size)
        for slot in range(rows):
            pairs = zip(self._held[slot], ids, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._truncate(slot, same)
            self._compute(slot, ids[same:])

    def step(self, rows: int, tokens: int) -> Pass:
        """See `protocol.Side`."""
        ids = prompt(tokens, self._runner.vocab_size)

        def run() -> None:
            batch = Batch()
            for slot in range(rows):
                start = len(self._held[slot])
                self._cache.reserve(slot, start + tokens)
                batch.add(slot, start, ids, tokens)
            self._runner.forward(batch)
            for slot in range(rows):
                self._grow(slot, ids)

        return run

    def prefill(self, prompt: Sequence[int]) -> Pass:
        """See `protocol.Side`. In passes as wide as the scheduler would make them."""

        def run() -> None:
            self._truncate(0, 0)
            self._compute(0, prompt)

        return run

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """See `protocol.Side`."""
        self._begun.discard(0)
        return np.concatenate([logits.copy() for logits in passes(self._runner, tokens)])

    def logits(self) -> list[float]:
        """See `protocol.Side`."""
        return self._last

    def _truncate(self, slot: int, length: int) -> None:
        if slot not in self._begun:
            self._begun.add(slot)
            self._cache.begin(slot, [0, 0])
        del self._held[slot][length:]
        self._cache.commit(slot, self._held[slot], length)

    def _compute(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens to a slot; the last one's logits are kept."""
        most = self._runner.max_tokens
        for first in range(0, len(tokens), most):
            part = tokens[first : first + most]
            start, last = len(self._held[slot]), first + most >= len(tokens)
            self._cache.reserve(slot, start + len(part))
            batch = Batch()
            batch.add(slot, start, part, int(last))
            logits = self._runner.forward(batch)
            if last:
                self._last = logits[-1].tolist()
            self._grow(slot, part)

    def _grow(self, slot: int, tokens: Sequence[int]) -> None:
        self._held[slot].extend(tokens)
        self._cache.commit(slot, self._held[slot], len(self._held[slot]))


if __name__ == "__main__":
    serve(OurSide())
