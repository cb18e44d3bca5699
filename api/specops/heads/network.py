"""The network that a draft head is, in torch: for training alone.

It guesses the token after next from the last token and the hidden state that this one was chosen
by. A stage of products mixes the two into what the target's next hidden state may be, and the
target's own output rows, of the tokens that it writes most often, say what that would choose. So it
has no state of its own: nothing has to be caught up with, and a second guess reads the first one's
state. (Reading hidden states: EAGLE, Li et al. 2024, https://arxiv.org/abs/2401.15077.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from specops.models.head_folder import EPSILON

_EXPANSION = 2  # inner width over the hidden state's


class Norm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), scale))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape in float32."""
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, EPSILON)


class HeadNetwork(nn.Module):
    """Guesses a token.

    Args:
        rows: [V, size], the target's output rows of the tokens that can be guessed; they are never
            trained. One row more is: it stands for all other tokens.
        scale: of what the last norm gives at first, the target's hidden states' own or less.
    """

    def __init__(self, rows: Tensor, scale: float) -> None:
        super().__init__()
        size = rows.shape[1]
        self.register_buffer("rows", rows)
        self.other = nn.Parameter(torch.zeros(1, size))
        self.token_norm, self.state_norm = Norm(size), Norm(size)
        self.mix = nn.Linear(2 * size, size, bias=False)
        self.inner_norm = Norm(size)
        self.gate = nn.Linear(size, _EXPANSION * size, bias=False)
        self.up = nn.Linear(size, _EXPANSION * size, bias=False)
        self.down = nn.Linear(_EXPANSION * size, size, bias=False)
        self.last_norm = Norm(size, scale)

    @property
    def table(self) -> Tensor:
        """[V + 1, size], the row of all other tokens last."""
        return torch.cat([self.rows, self.other])

    def forward(self, codes: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Guess what follows.

        Args:
            codes: [n], places of the last tokens in the table.
            states: [n, size], the target's hidden states that these were chosen by, or those of
                the guess before.

        Returns:
            [n, V + 1] logits of the next tokens, and [n, size] states that they follow from.
        """
        table = self.table
        token = self.token_norm(functional.embedding(codes, table))
        x = self.mix(torch.cat([token, self.state_norm(states)], -1))
        inner = self.inner_norm(x)
        x = x + self.down(functional.silu(self.gate(inner)) * self.up(inner))
        state = self.last_norm(x)
        return state @ table.T, state
