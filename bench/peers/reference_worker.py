"""transformers in float32 as a side: the reference for all kinds of weights."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from bench.peers.protocol import Side
from bench.tools.worker import serve


class ReferenceSide(Side):
    """A checkpoint as its authors run it. Answers end where the model ends them."""

    def load(self, model: str, *, threads: int, rows: int, capacity: int) -> str:
        """See `Side`."""
        del rows, capacity  # it keeps nothing between texts
        torch.set_num_threads(threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(  # nosec B615
            model, dtype=torch.float32
        ).eval()
        return f"transformers {transformers.__version__}"

    def _complete(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        found = []
        for prompt in prompts:
            with torch.inference_mode():
                whole = self._model.generate(
                    torch.tensor([list(prompt)]), max_new_tokens=output, do_sample=False
                )
            found.append(whole[0, len(prompt) :].tolist())
        return found

    def _score(self, tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            return self._model(torch.tensor([list(tokens)])).logits[0].numpy()


if __name__ == "__main__":
    serve(ReferenceSide())
