"""Muon for the matrices, AdamW for the embedding and the norms, one cosine for both.

Muon orthogonalizes the momentum of each weight matrix by a Newton-Schulz iteration (Jordan et
al., 2024, https://kellerjordan.github.io/posts/muon/). At this size and with only a few passes
over a few megabytes it needs markedly fewer tokens than AdamW for the same loss.
"""

import math

import torch
from torch import Tensor, nn


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Push all singular values of `matrix [..., rows, columns]` towards 1 (quintic iteration)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized; decoupled weight decay. For 2-D weights of linear layers only."""

    def __init__(
        self, parameters: list[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix; those of one shape are orthogonalized in one batch."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))
                directions = orthogonalize(torch.stack(updates))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, direction in zip(parameters, directions, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(direction, alpha=-scale)


class Optimizer:
    """Both optimizers behind one face; `progress` in [0, 1] sets the learning rate."""

    def __init__(
        self, model: nn.Module, *, matrix_lr: float, vector_lr: float, weight_decay: float = 0.1
    ) -> None:
        matrices, vectors = [], []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim == 2 and "embed_tokens" not in name
            (matrices if is_matrix else vectors).append(parameter)
        self.parts: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=matrix_lr, momentum=0.95, weight_decay=weight_decay),
            torch.optim.AdamW(
                vectors, lr=vector_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True
            ),
        ]
        self.peaks = [matrix_lr, vector_lr]

    def step(self, progress: float, *, warmup: float = 0.02) -> None:
        """Apply the gradients at `progress` through the run: linear warm-up, cosine to zero."""
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
        """Restore what `state_dict` gave."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
