"""Optimizes matrices with Muon, embedding and norms with AdamW, with one cosine schedule.

Muon orthogonalizes the momentum of each weight matrix with a Newton-Schulz iteration (Jordan et
al., 2024, https://kellerjordan.github.io/posts/muon/). At this size, with only a few epochs over a
few megabytes, it needs markedly fewer tokens than AdamW for the same loss.
"""

import math

import torch
from torch import nn


class Optimizer:
    """Both optimizers behind one interface; `progress` in [0, 1] sets the learning rate.

    Args:
        model: the model, whose parameters it updates.
        matrix_lr: peak learning rate of the matrices.
        vector_lr: peak learning rate of the other parameters.
    """

    def __init__(self, model: nn.Module, *, matrix_lr: float, vector_lr: float) -> None:
        matrices, vectors = [], []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and "embed_tokens" not in name
            (matrices if is_matrix else vectors).append(parameter)
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=matrix_lr, momentum=0.95, weight_decay=0.1),
            torch.optim.AdamW(
                vectors, lr=vector_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True
            ),
        ]
        self.peaks = [matrix_lr, vector_lr]

    def step(self, progress: float, *, warmup: float = 0.02) -> None:
        """Apply the gradients: linear warm-up up to a progress of `warmup`, cosine to zero."""
        factor = min(1.0, (progress + 1e-3) / warmup)
        factor *= 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for part, peak in zip(self.parts, self.peaks, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        """The state of both parts, in order."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Restore a state from `state_dict`."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
