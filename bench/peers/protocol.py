"""What the processes under comparison do when they are asked.

Runs in the peers' environment too, so nothing but the standard library. Every side takes its times
with the code below, around the same passes: none is measured in a way of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bench.tools import worker

Pass = Callable[[], object]


class Side(Protocol):
    """One way to run the model. A row is a sequence with keys and values of its own.

    A side has `load` and those methods that it is asked for.
    """

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """Load a model for `rows` rows of `capacity` tokens; return what it runs on, in words."""

    def hold(self, rows: int, length: int) -> None:
        """Make each of the first rows hold exactly `length` tokens."""

    def step(self, rows: int, tokens: int) -> Pass:
        """Prepare a pass of `tokens` tokens in each of the first rows, with logits for all."""

    def prefill(self, prompt: Sequence[int]) -> Pass:
        """Prepare the passes of a prompt in row 0, which is empty, with its last logits."""

    def logits(self) -> list[float]:
        """[V] logits of the last token of the last pass."""

    def complete(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """Generate `output` tokens, the likeliest each time, for prompts that arrive at once."""

    def score(self, tokens: Sequence[int]) -> Any:
        """Logits of a text's tokens, an array [S, V] of float32."""


def prompt(tokens: int, vocab: int) -> list[int]:
    """Token ids without a pattern, the same on every side."""
    return [1 + index * 7919 % (vocab - 1) for index in range(tokens)]


class Timed:
    """What a side's process answers, by the name of the request; times are in seconds."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def load(self, model: str, threads: int, rows: int, capacity: int) -> dict[str, str]:
        """See `Side.load`."""
        return {"runs_on": self._side.load(model, threads=threads, rows=rows, capacity=capacity)}

    def measure(self, rows: int, tokens: int, past: int, passes: int) -> dict[str, list[float]]:
        """Time passes that follow each other as in decoding, with `past` tokens held on average.

        A first pass is not counted: what it allocates, the later ones have.
        """
        side = self._side
        side.hold(rows, past - tokens * (passes // 2 + 1))
        seconds = [_timed(side.step(rows, tokens)) for _ in range(passes + 1)]
        return {"seconds": seconds[1:]}

    def prefill(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        """Time a whole prompt, from an empty row to its last token's logits."""
        self._side.hold(1, 0)
        return {"seconds": [_timed(self._side.prefill(tokens))]}

    def logits(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        """[V] of a text's last token."""
        self.prefill(tokens)
        return {"logits": self._side.logits()}

    def complete(self, prompts: Sequence[Sequence[int]], output: int) -> dict[str, Any]:
        """See `Side.complete`."""
        start = time.perf_counter()
        tokens = self._side.complete(prompts, output)
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def score(self, texts: Sequence[tuple[Sequence[int], int]], file: str) -> dict[str, Any]:
        """Write the logits of each text's tokens to a file, from a first token of it on."""
        with open(file, "wb") as written:
            for tokens, first in texts:
                written.write(memoryview(self._side.score(tokens)[first:]).cast("B"))
        return {}


def _timed(run: Pass) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def serve(side: Any) -> None:
    """Answer the requests on standard input until it ends."""
    worker.serve(Timed(side))
