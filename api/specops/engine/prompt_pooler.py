"""Reads a prompt for requests that want its embedding or the probabilities of its tokens.

Both need the target's result at every token of the prompt. So such a prompt takes nothing from the
prefix cache, and its pieces need a row of hidden states or of logits for each token.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from specops.request import GenerationRequest, Logprob, Output
from specops.runtime.sampling import Floats, NotFinite, logprob


class PromptLogprobs(Sequence[Logprob | None]):
    """Probabilities of a prompt's tokens, of which the first has none.

    Arrays take a tenth of the memory: each token of a long prompt may have 20 likely alternatives.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._ranks, self._tokens, self._values = array("i"), array("i"), array("d")

    def append(self, logprob: Logprob, rank: int) -> None:
        """Add the next token's; its rank among all tokens counts from 1."""
        self._ranks.append(rank)
        self._tokens.extend([token for token, _ in logprob.top])
        self._values.extend([logprob.chosen, *(value for _, value in logprob.top)])

    def __len__(self) -> int:
        return 1 + len(self._ranks)

    def __getitem__(self, place: int) -> Logprob | None:  # type: ignore[override]  # no slices
        place = range(len(self))[place]
        if place == 0:
            return None
        at, top = place - 1, self._top
        chosen, *values = self._values[at * (top + 1) : place * (top + 1)]
        tokens = self._tokens[at * top : place * top]
        return Logprob(chosen, tuple(zip(tokens, values, strict=True)), self._ranks[at])


class PromptPooler:
    """Reads the prompts of one request, each token once. Used by the engine's thread.

    An embedding is the mean of the last hidden states of a prompt's tokens, scaled to length 1.
    They are summed in the order of the tokens, however the prompt is cut.

    Args:
        request: the request with the prompts.

    Attributes:
        seconds: mean time to read a token.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.seconds = 0.0
        self._request = request
        self._prompt = request.prompt_tokens
        self._position = 0  # of the first token that was not read
        self._sum: npt.NDArray[np.float64] | None = None
        self._embeddings: list[Floats] = []
        self._logprobs = PromptLogprobs(request.prompt_logprobs or 0)
        self._handed_out = request.prompt_logprobs is None

    def read(self, start: int, logits: Floats, hidden: Floats) -> None:
        """Read tokens of the prompt. Tokens that were read before a preemption are skipped.

        Args:
            start: position of the first token.
            logits: [n, V], the logits behind each token; none for an embedding.
            hidden: [n, H], their last hidden states; read only for an embedding.
        """
        count = len(hidden if self._request.embed else logits)
        for position in range(max(start, self._position), start + count):
            row = position - start
            if self._request.embed:
                state = hidden[row].astype(np.float64)
                self._sum = state if self._sum is None else self._sum + state
            elif position + 1 < len(self._prompt):
                token, most = self._prompt[position + 1], self._request.prompt_logprobs or 0
                rank = 1 + np.count_nonzero(logits[row] > logits[row, token])
                self._logprobs.append(logprob(logits[row], token, most), int(rank))
            self._position = position + 1

    def next_prompt(self) -> tuple[int, ...] | None:
        """Keep the embedding of the prompt that ends, and go to the next one, if any."""
        if self._sum is not None:
            length = float(np.linalg.norm(self._sum)) or 1.0
            if not math.isfinite(length):
                raise NotFinite
            self._embeddings.append((self._sum / length).astype(np.float32))
        self._sum, self._position = None, 0
        if len(self._embeddings) > len(self._request.more_prompts):
            return None
        self._prompt = self._request.more_prompts[len(self._embeddings) - 1]
        return self._prompt

    def add(self, output: Output) -> Output:
        """Add the probabilities to the first output, and the embeddings to the last."""
        if not self._handed_out:
            self._handed_out = True
            output = replace(output, prompt=self._logprobs)
        if self._embeddings and output.finish:
            output = replace(output, embeddings=np.stack(self._embeddings))
        return output
