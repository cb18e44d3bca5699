"""The interface of the compared engines' processes.

It also runs in the other engines' environments, so it needs only the standard library. The code
below times every side, around the same passes.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

Pass = Callable[[], object]


def prompt(tokens: int, vocab: int) -> list[int]:
    """Pseudo-random token ids, the same on every side."""
    return [1 + index * 7919 % (vocab - 1) for index in range(tokens)]


class Side:
    """One engine. A row is a sequence with its own keys and values.

    A side implements `load`, and those of the following methods that its benchmark needs:

    - `load(model, threads, rows, capacity)` loads a model for `rows` rows of `capacity` tokens and
      returns name and version of the engine.
    - `_hold(rows, length)` makes each of the first `rows` rows hold exactly `length` tokens.
    - `_step(rows, tokens)` prepares a pass of `tokens` tokens in each of the first rows, with
      logits for all of them.
    - `_prefill(prompt)` prepares the passes of a prompt in row 0, which is empty, with the logits
      of its last token.
    - `_logits()` returns the logits [V] of the last token of the last pass.
    - `_complete(prompts, output)` generates `output` tokens for each of the concurrent prompts,
      greedily.
    - `_score(tokens)` returns the logits of a text's tokens, [S, V] float32.
    """

    def measure(self, rows: int, tokens: int, past: int, passes: int) -> list[float]:
        """Seconds of consecutive passes as in decoding, after `past` tokens on average.

        The first pass does not count: it allocates memory.

        Args:
            rows: number of rows.
            tokens: tokens of each row in a pass.
            past: mean number of tokens before a pass.
            passes: number of timed passes.
        """
        self._hold(rows, past - tokens * (passes // 2 + 1))
        return [_timed(self._step(rows, tokens)) for _ in range(passes + 1)][1:]

    def prefill(self, tokens: Sequence[int]) -> list[float]:
        """Seconds of a whole prompt, from an empty row to the logits of its last token."""
        self._hold(1, 0)
        return [_timed(self._prefill(tokens))]

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Logits [V] of a text's last token."""
        self.prefill(tokens)
        return self._logits()

    def complete(self, prompts: Sequence[Sequence[int]], output: int) -> tuple[float, Any]:
        """Seconds, and the tokens of the answers to concurrent prompts."""
        start = time.perf_counter()
        tokens = self._complete(prompts, output)
        return time.perf_counter() - start, tokens

    def score(self, texts: Sequence[tuple[Sequence[int], int]], file: str) -> None:
        """Write logits to a file: for each text and first token, those from that token on."""
        with open(file, "wb") as written:
            for tokens, first in texts:
                written.write(memoryview(self._score(tokens)[first:]).cast("B"))


def _timed(run: Pass) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
