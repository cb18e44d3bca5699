"""How the weights of an exported model are stored: the one dial of an export.

What each kind costs in quality and in time: docs/quantization.md, from `python -m bench quality`.
Head and embedding have 8 bits: in 4 they cost the demo target 2.1 and 1.0 thousandths of a bit per
byte, a quarter of what all its layers cost, for a small part of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from specops.models.gguf_files import OWN_WEIGHTS
from specops.weights import BLOCKS, DATA_FREE, DEFAULT_BLOCK, WeightsName

_BITS = (4, 8)


class BlockFormat(NamedTuple):
    """How one weight is stored: bits per weight and weights per scale.

    `fractions`: it comes with blocks of its own, whose zero points are fractions.
    """

    bits: int
    block: int
    fractions: bool = False


@dataclass(frozen=True)
class Quantization:
    """Bits per weight and weights per scale, for the linear layers, the head and the embedding.

    `bits` is 32 (plain float32, no blocks), 8 or 4. The output head and the embedding stay at
    8 bits by default even where the layers take 4: together they decide which token wins a
    near-tie, and a tied pair shares its bytes in the file only when both are stored alike.
    Weights of 4 bits are rounded by what they are multiplied with where they are `calibrated`, or
    each to the nearest: for random weights, on which there is nothing to look at.
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
        """Reads `fp32`, `int8`, `int4`, one of the last two with a block, `int4` with `-rtn`.

        Such as `int4-32` or `int4-128-rtn`; without a block it is 128. Raises ValueError naming
        the text for anything else.
        """
        found = WeightsName.parse(text)
        if found is None:
            raise ValueError(
                f"unknown quantization {text!r}: use fp32, int8, int4, or a block size with "
                f"one of them such as int8-32 or int4-{DEFAULT_BLOCK}, and for int4 {DATA_FREE} "
                f"behind it to round each weight to the nearest, such as int4-32{DATA_FREE}"
            )
        if found.bits == 32:
            return cls(bits=32, head_bits=32, embedding_bits=32)
        return cls(bits=found.bits, block=found.block, calibrated=not found.data_free)

    @property
    def name(self) -> str:
        """The text `parse` reads: the block always included."""
        return WeightsName(self.bits, self.block, not self.calibrated).full

    def blocks(self, bits: int) -> BlockFormat:
        """The format of a weight of `bits`: that of the layers, of the head, of the embedding."""
        return BlockFormat(bits, self.block)


@dataclass(frozen=True)
class FileQuantization(Quantization):
    """The weights of a file that has them in blocks: `kind` is what it calls that.

    A matrix that comes in blocks keeps them. All others take 8 bits in blocks of 32; the embedding,
    which is looked up, float32.
    """

    bits: int = 8
    block: int = 32
    embedding_bits: int = 32
    kind: str = ""

    def __post_init__(self) -> None:
        """Its formats are its own."""

    @property
    def name(self) -> str:
        """What the weights are called where those of an export are called `int8-32`."""
        return f"{OWN_WEIGHTS}-{self.kind}"
