"""The network of a draft head in torch, for the training only.

The network guesses the next token from the last token and the hidden state from which that token
was chosen. It mixes the two into a prediction of the target's next hidden state. The target's
output rows of its most frequent tokens turn this state into logits. So the head has no state of its
own: it needs no prefill, and a second guess reads the state of the first one. (Hidden states as
input: EAGLE, Li et al. 2024, https://arxiv.org/abs/2401.15077.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from specops.models.head_folder import EPSILON

_EXPANSION = 2  # inner width, relative to the hidden state


class HeadNetwork(nn.Module):
    """Guesses a token.

    Args:
        rows: [V, size], the target's output rows of the tokens that can be guessed; not trained.
            One more row is trained, for all other tokens.
        scale: initial scale of the last norm's output, at most that of the hidden states.
    """

    def __init__(self, rows: Tensor, scale: float) -> None:
        super().__init__()
        size = rows.shape[1]
        self.register_buffer("rows", rows)
        self.other = nn.Parameter(torch.zeros(1, size))
        norms = (nn.RMSNorm(size, EPSILON) for _ in range(4))
        self.token_norm, self.state_norm, self.inner_norm, self.last_norm = norms
        nn.init.constant_(self.last_norm.weight, scale)
        self.mix = nn.Linear(2 * size, size, bias=False)
        self.gate = nn.Linear(size, _EXPANSION * size, bias=False)
        self.up = nn.Linear(size, _EXPANSION * size, bias=False)
        self.down = nn.Linear(_EXPANSION * size, size, bias=False)

    @property
    def table(self) -> Tensor:
        """[V + 1, size], with the row of all other tokens at the end."""
        return torch.cat([self.rows, self.other])

    def forward(self, codes: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Guess the next tokens.

        Args:
            codes: [n], indices of the last tokens in the table.
            states: [n, size], hidden states of the target from which these tokens were chosen, or
                states of the previous guess.

        Returns:
            [n, V + 1] logits of the next tokens, and [n, size] states from which they follow.
        """
        table = self.table
        token = self.token_norm(functional.embedding(codes, table).float())
        x = self.mix(torch.cat([token, self.state_norm(states.float())], -1))
        inner = self.inner_norm(x.float())  # in float32 where products are not
        x = x + self.down(functional.silu(self.gate(inner)) * self.up(inner))
        state = self.last_norm(x.float())
        return state @ table.T, state
