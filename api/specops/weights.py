"""Reads the names of weight formats that settings, presets and the converter use."""

import re
from typing import NamedTuple, Self

BLOCKS = (16, 32, 64, 128, 256)
DEFAULT_BLOCK = 128
MIXED = "-mixed"  # in the name of 4-bit formats that leave the most sensitive weights in 8 bits
DATA_FREE = "-rtn"  # at the end of the name of 4-bit formats rounded to the nearest
_NAME = re.compile(rf"int([48])(?:-({'|'.join(map(str, BLOCKS))}))?({MIXED})?({DATA_FREE})?")


class WeightsName(NamedTuple):
    """The parts of a name: `fp32`, `int8`, `int4`, with a block as in `int8-32`, `int4-128-mixed`.

    Attributes:
        bits: bits of a weight: 32, 8 or 4.
        block: number of weights that share a scale; meaningless for 32 bits.
        mixed: whether the layers' most sensitive weights have 8 bits instead of 4.
        data_free: whether each weight is rounded to the nearest, without calibration.
    """

    bits: int
    block: int = DEFAULT_BLOCK
    mixed: bool = False
    data_free: bool = False

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the parts of a name; None if no format has this name."""
        if text == "fp32":
            return cls(32)
        match = _NAME.fullmatch(text)
        if match is None or (match[1] == "8" and (match[3] or match[4])):
            return None
        block = int(match[2] or DEFAULT_BLOCK)
        return cls(int(match[1]), block, bool(match[3]), bool(match[4]))

    @property
    def full(self) -> str:
        """The name with its block."""
        if self.bits == 32:
            return "fp32"
        ending = (MIXED if self.mixed else "") + (DATA_FREE if self.data_free else "")
        return f"int{self.bits}-{self.block}{ending}"
