"""Sizes of the pair: what two CPU cores train in 80 minutes, and what an accelerator can afford.

Hidden and feed-forward sizes are multiples of 128, the block of the int4 quantization.
"""

from dataclasses import dataclass

from training.model import ModelConfig


@dataclass(frozen=True)
class Preset:
    """One pair and how long to train it; lengths are (tokens per row, rows per step)."""

    target: ModelConfig
    draft: ModelConfig
    target_tokens: int
    draft_tokens: int
    short: tuple[int, int]
    long: tuple[int, int]


PRESETS = {
    "cpu": Preset(
        target=ModelConfig(384, 1024, 5, 6, 2),
        draft=ModelConfig(128, 256, 2, 2, 1),
        target_tokens=18_000_000,
        draft_tokens=20_000_000,
        short=(512, 16),
        long=(1024, 8),
    ),
    "cuda": Preset(
        target=ModelConfig(768, 2048, 8, 12, 4),
        draft=ModelConfig(256, 768, 3, 4, 2),
        target_tokens=60_000_000,
        draft_tokens=80_000_000,
        short=(512, 32),
        long=(1024, 16),
    ),
}
