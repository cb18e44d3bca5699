"""How the weights of an exported model are stored: the one setting of an export.

docs/quantization.md has the quality and speed of each kind, from `python -m bench quality`. Head
and embedding have 8 bits: in 4 bits they cost the demo target 2.1 and 1.0 thousandths of a bit per
byte, a quarter of the cost of all its layers, for a small part of a forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specops.models.gguf_files import OWN_WEIGHTS
from specops.weights import BLOCKS, DATA_FREE, DEFAULT_BLOCK, MIXED, WeightsName

_BITS = (4, 8)


class BlockFormat(NamedTuple):
    """How one weight is stored: bits per weight and weights per scale."""

    bits: int
    block: int


@dataclass(frozen=True)
class Quantization:
    """Bits per weight and weights per scale, for the linear layers, the head and the embedding.

    `bits` is 32 (plain float32, no blocks), 8 or 4. Output head and embedding stay at 8 bits by
    default even if the layers have 4: together they decide which token wins a near-tie. A tied pair
    shares its bytes in the file only if both have the same format. With `calibrated`, 4-bit weights
    are rounded by the inputs of their products; without it, each to the nearest, for random
    weights, which write no text to calibrate on.
    """

    bits: int
    block: int = DEFAULT_BLOCK
    head_bits: int = 8
    embedding_bits: int = 8
    calibrated: bool = True

    def __post_init__(self) -> None:
        if self.bits == 32:
            if (self.head_bits, self.embedding_bits) != (32, 32):
                raise ValueError("an fp32 export keeps its head and embedding in fp32 too")
            return
        for name in ("bits", "head_bits", "embedding_bits"):
            if getattr(self, name) not in _BITS:
                raise ValueError(f"{name} must be one of {_BITS}, got {getattr(self, name)}")
        if self.block not in BLOCKS:
            raise ValueError(f"block must be one of {BLOCKS}, got {self.block}")

    @classmethod
    def parse(cls, text: str) -> Quantization:
        """Reads `fp32`, `int8[-BLOCK]` or `int4[-BLOCK][-mixed][-rtn]`; the default block is 128.

        Raises ValueError naming the text for anything else.
        """
        found = WeightsName.parse(text)
        if found is None:
            raise ValueError(
                f"unknown quantization {text!r}: use fp32, int8, int4, or a block size with "
                f"one of them such as int8-32 or int4-{DEFAULT_BLOCK}, and for int4 {MIXED} behind "
                f"it to leave the most sensitive weights in 8 bits, then {DATA_FREE} to round each "
                f"weight to the nearest, such as int4-32{MIXED}{DATA_FREE}"
            )
        if found.bits == 32:
            return cls(bits=32, head_bits=32, embedding_bits=32)
        kind = MixedQuantization if found.mixed else cls
        return kind(bits=found.bits, block=found.block, calibrated=not found.data_free)

    @property
    def value_bits(self) -> int:
        """Bits of the layers' projections to attention's values."""
        return self.bits

    @property
    def name(self) -> str:
        """The text that `parse` reads, always with the block."""
        mixed = self.value_bits != self.bits
        return WeightsName(self.bits, self.block, mixed, not self.calibrated).full


@dataclass(frozen=True)
class MixedQuantization(Quantization):
    """Layers in 4 bits, but their projections to attention's values in 8.

    Every position that attends reads the values' errors, and these weights are few: with grouped
    queries one or two in a hundred. bench/results/mixes.md has what other mixes cost.
    """

    @property
    def value_bits(self) -> int:
        """8."""
        return 8


@dataclass(frozen=True)
class FileQuantization(Quantization):
    """The weights of a GGUF; `kind` is the file's name for them.

    A matrix in blocks keeps them. One of plain numbers becomes Q8_0, but as an embedding it stays
    float32.
    """

    bits: int = 8
    block: int = 32
    embedding_bits: int = 32
    kind: str = ""

    @property
    def name(self) -> str:
        """The name of the weights, such as `gguf-Q4_K_M`."""
        return f"{OWN_WEIGHTS}-{self.kind}"

    def __post_init__(self) -> None:
        """The file decides about the formats: there is nothing to check."""
