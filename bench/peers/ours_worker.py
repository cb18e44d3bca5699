"""Our side of the comparison: the model runner that the service would load with `SPECOPS_*`.

The side loads the whole engine and uses its model runner. So weight tiles, read-ahead, threads, KV
cache and the size of a prompt's chunks are those of the service.
"""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import onnxruntime

from bench.peers.protocol import Pass, Side, prompt
from bench.runtime.forward import passes
from bench.tools.worker import serve
from specops.config import Settings
from specops.engine.engine import Engine
from specops.runtime.batch import Batch


class OurSide(Side):
    """The engine's model runner; a row is a slot of its KV cache."""

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """See `Side`."""
        settings = Settings.from_env()
        engine = Engine.load(settings)
        found = (settings.target, engine.info.threads, settings.slots, settings.context)
        if found != (model, threads, rows, capacity):
            raise ValueError(f"the environment's settings are {found}")
        self._runner = engine.scheduler.target
        self._cache = self._runner.cache
        self._held: list[list[int]] = [[] for _ in range(rows)]  # tokens of each slot
        self._begun: set[int] = set()
        self._last: list[float] = []
        return f"onnxruntime {onnxruntime.__version__}"

    def _hold(self, rows: int, length: int) -> None:
        ids = prompt(length, self._runner.vocab_size)
        for slot in range(rows):
            pairs = zip(self._held[slot], ids, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self._truncate(slot, same)
            self._compute(slot, ids[same:])

    def _step(self, rows: int, tokens: int) -> Pass:
        ids = prompt(tokens, self._runner.vocab_size)

        def run() -> None:
            batch = Batch()
            for slot in range(rows):
                start = len(self._held[slot])
                self._cache.reserve(slot, start + tokens)
                batch.add(slot, start, ids, tokens)
            self._runner.forward(batch)
            for slot in range(rows):
                self._held[slot].extend(ids)

        return run

    def _prefill(self, prompt: Sequence[int]) -> Pass:
        def run() -> None:  # in passes as wide as the scheduler's
            self._truncate(0, 0)
            self._compute(0, prompt)

        return run

    def _score(self, tokens: Sequence[int]) -> np.ndarray:
        self._begun.discard(0)
        return np.concatenate([logits.copy() for logits in passes(self._runner, tokens)])

    def _logits(self) -> list[float]:
        return self._last

    def _truncate(self, slot: int, length: int) -> None:
        if slot not in self._begun:
            self._begun.add(slot)
            self._cache.allocate(slot, [], share=False)
        del self._held[slot][length:]  # no token is ever committed, so the next pass overwrites

    def _compute(self, slot: int, tokens: Sequence[int]) -> None:
        """Append tokens to a slot and keep the logits of the last one."""
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
            self._held[slot].extend(part)


if __name__ == "__main__":
    serve(OurSide())
