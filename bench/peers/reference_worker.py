"""transformers in float32: what weights of every kind are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from bench.peers.protocol import serve


class ReferenceSide:
    """A checkpoint as its authors run it."""

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """See `protocol.Side`."""
        del rows, capacity  # it keeps nothing between texts
        torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(  # nosec B615
            model, dtype=torch.float32
        ).eval()
        return f"transformers {transformers.__version__}"

    def complete(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """See `protocol.Side`; an answer ends where the model ends it."""
        found = []
        for prompt in prompts:
            with torch.inference_mode():
                whole = self._model.generate(
                    torch.tensor([list(prompt)]), max_new_tokens=output, do_sample=False
                )
            found.append(whole[0, len(prompt) :].tolist())
        return found

    def score(self, tokens: Sequence[int]) -> Any:
        """See `protocol.Side`."""
        with torch.inference_mode():
            return self._model(torch.tensor([list(tokens)])).logits[0].numpy()


if __name__ == "__main__":
    serve(ReferenceSide())
