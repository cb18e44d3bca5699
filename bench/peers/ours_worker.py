"""Our side of the comparison: the decoder that the service would load with `SPECOPS_*`.

The engine is loaded whole and its decoder taken out: prepacked weights, read ahead, threads and
chunks of prompts are the service's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.protocol import Pass, prompt, serve
from specops import session
from specops.config import Settings
from specops.engine import Engine


class OurSide:
    """The engine's decoder."""

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """See `protocol.Side`.

        Raises:
            ValueError: the settings say something else.
        """
        settings = Settings.from_env()
        engine = Engine.load(settings)
        said = (settings.target, engine.info.threads, settings.rows, settings.context)
        if said != (model, threads, rows, capacity):
            raise ValueError(f"the environment's settings are {said}")
        self._chunk = settings.prefill_chunk
        self._decoder = engine.scheduler.target
        self._last: list[float] = []
        return f"onnxruntime {session.VERSION}"

    def hold(self, rows: int, length: int) -> None:
        """See `protocol.Side`."""
        decoder, cache = self._decoder, self._decoder.cache
        kept = min(cache.lengths[0], length)
        cache.truncate(0, kept)
        ids = prompt(length, decoder.vocab_size)
        for start in range(kept, length, self._chunk):
            decoder.prefill(0, ids[start : start + self._chunk])
        for keys, values in cache.buffers:
            keys[1:rows, :, :length] = keys[:1, :, :length]
            values[1:rows, :, :length] = values[:1, :, :length]
        cache.lengths[1:rows] = [length] * (rows - 1)

    def step(self, rows: int, tokens: int) -> Pass:
        """See `protocol.Side`."""
        decoder, ids = self._decoder, prompt(tokens, self._decoder.vocab_size)
        if tokens == 1:
            return lambda: decoder.decode(0, ids * rows)
        if rows == 1:
            return lambda: decoder.extend(0, ids)
        raise ValueError("several rows take one token each")

    def prefill(self, prompt: Sequence[int]) -> Pass:
        """See `protocol.Side`. In the chunks that the scheduler would cut."""

        def run() -> None:
            for start in range(0, len(prompt), self._chunk):
                chunk = prompt[start : start + self._chunk]
                logits = self._decoder.prefill(0, chunk)
            self._last = logits[-1].tolist()

        return run

    def logits(self) -> list[float]:
        """See `protocol.Side`."""
        return self._last


if __name__ == "__main__":
    serve(OurSide())
