"""llama.cpp's batched decode as a side: all prompts in one batch, then a token of each per pass.

Runs in the peers' environment, through llama.cpp's C interface. No server's scheduling comes
between: who arrives at once needs none, so this is the least that llama.cpp takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp
import numpy as np

from bench.peers.llama_worker import LlamaSide
from bench.peers.protocol import serve


class LlamaServing(LlamaSide):
    """A context with a sequence per request."""

    def complete(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """See `protocol.Serving`."""
        llama_cpp.llama_memory_clear(self._memory, False)
        self._lengths = [0] * self._rows
        self._prepare(list(enumerate(prompts)), every=False)()
        found: list[list[int]] = [[] for _ in prompts]
        ends = np.cumsum([len(prompt) for prompt in prompts]) - 1
        while True:
            for answer, end in zip(found, ends, strict=True):
                answer.append(self._likeliest(int(end)))
            if len(found[0]) == output:
                return found
            self._prepare([(row, answer[-1:]) for row, answer in enumerate(found)], every=True)()
            ends = np.arange(len(prompts))

    def _likeliest(self, place: int) -> int:
        """The token with the highest logit at a place of the last batch."""
        logits = llama_cpp.llama_get_logits_ith(self._context, place)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


if __name__ == "__main__":
    serve(LlamaServing())
