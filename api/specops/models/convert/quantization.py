"""How the weights of an exported model are stored: the one dial of an export.

Chosen by measurements in November 2026 (2 cores, AMD EPYC, AVX512-VNNI,
onnxruntime 1.31.1; in thousandths of a bit per byte that the demo target needs more):

- Block 128. int4 costs 8.9 over fp32; blocks of 32 would cost 5.6 and 1.4 times the time of a
  pass. Blocks of 256 take 0.85 of it, but the demo target's short rows do not fill them, so what
  they cost in quality is not known here.
- int8 for head and embedding. An int4 head costs 2.1 more, an int4 embedding 1.0.
- The search for scales. Neither plain rounding (0.2 less, standard error 0.7) nor zero points
  (0.8 less, standard error 0.5) is better for certain. Zero points take the same time, and at
  blocks of 32 they are the best there is (4.8).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from specops.models.convert.quantize import Method

OWN_WEIGHTS = "gguf"  # the quantization of files that have their own
_DEFAULT_BLOCK = 128
_DEFAULT_METHOD = Method.SEARCH
_BLOCKS = (16, 32, 64, 128, 256)
_BITS = (4, 8)


class BlockFormat(NamedTuple):
    """How one weight is stored: bits per weight, weights per scale, and how scales are found.

    `fractions`: it comes with blocks of its own, whose zero points are fractions.
    """

    bits: int
    block: int
    method: Method
    fractions: bool = False


@dataclass(frozen=True)
class Quantization:
    """Bits per weight and weights per scale, for the linear layers, the head and the embedding.

    `bits` is 32 (plain float32, no blocks), 8 or 4. The output head and the embedding stay at
    8 bits by default even where the layers take 4: together they decide which token wins a
    near-tie, and a tied pair shares its bytes in the file only when both are stored alike.
    """

    bits: int
    block: int = _DEFAULT_BLOCK
    head_bits: int = 8
    embedding_bits: int = 8
    method: Method = _DEFAULT_METHOD

    def __post_init__(self) -> None:
        if self.bits == 32:
            if (self.head_bits, self.embedding_bits) != (32, 32):
                raise ValueError("an fp32 export keeps its head and embedding in fp32 too")
            return
        for name in ("bits", "head_bits", "embedding_bits"):
            if getattr(self, name) not in _BITS:
                raise ValueError(f"{name} must be one of {_BITS}, got {getattr(self, name)}")
        if self.block not in _BLOCKS:
            raise ValueError(f"block must be one of {_BLOCKS}, got {self.block}")

    @classmethod
    def parse(cls, text: str) -> Quantization:
        """Reads `fp32`, `int8`, `int4`, one of the last two with a block and int4 with a method.

        Such as `int4-32` or `int4-128-rtn`; without a block it is 128. Raises ValueError naming
        the text for anything else.
        """
        if text == "fp32":
            return cls(bits=32, head_bits=32, embedding_bits=32)
        methods = "|".join(Method)
        match = re.fullmatch(rf"int(4|8)(?:-(\d+))?(?:-({methods}))?", text)
        if match is None or (match[1] == "8" and match[3]):
            raise ValueError(
                f"unknown quantization {text!r}: use fp32, int8, int4, or a block size with "
                f"one of them such as int8-32 or int4-{_DEFAULT_BLOCK}, and for int4 one of "
                f"{', '.join(Method)}, such as int4-{_DEFAULT_BLOCK}-{Method.ROUND}"
            )
        bits, block, method = match.groups()
        return cls(
            bits=int(bits),
            block=int(block or _DEFAULT_BLOCK),
            method=Method(method or _DEFAULT_METHOD),
        )

    @property
    def name(self) -> str:
        """The text `parse` reads: the block always included, the method unless it is default."""
        if self.bits == 32:
            return "fp32"
        method = "" if self.method is _DEFAULT_METHOD else f"-{self.method}"
        return f"int{self.bits}-{self.block}{method}"

    def blocks(self, bits: int) -> BlockFormat:
        """The format of a weight of `bits`: that of the layers, of the head, of the embedding."""
        return BlockFormat(bits, self.block, self.method)


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
