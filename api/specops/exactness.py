"""Finds out how passes must be cut on this machine so that the cuts cannot be seen in the logits.

Kernels differ with the number of tokens in a pass. Our own products (`specops.kernels`) give a
token the same bits beside any others, but with onnxruntime 1.31 one token takes another attention
kernel than several: passes of two tokens or more agree to the last bit. ONNX Runtime's products on
AVX512-VNNI with blocks of 128 compute tokens in pairs, the odd one out in a kernel whose sums round
differently: there, passes of even width agree. Other processors have other kernels, so it is
measured and not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np

from specops.decoder import WIDEST_ALIGN, Decoder, Logits

_WIDTH = 16  # tokens compared
_MULTIPLES = (1, 3, 2, 5)  # widths tried, in units of the alignment


def exact_align(decoder: Decoder) -> int | None:
    """The smallest multiple of tokens whose passes give the same bits however they are cut.

    Takes about five passes of 16 tokens in row 0, which must be empty, and leaves it empty.

    Args:
        decoder: takes at least 16 tokens in a pass and in a row.

    Returns:
        2, 4 or 8; None where even passes of 8 differ: then no output can be promised to be
        equal to the bit.
    """
    tokens = [index * 7919 % decoder.vocab_size for index in range(1, _WIDTH + 1)]
    whole = _logits(decoder, tokens, [_WIDTH], 1)
    # Not 1: a single token takes another attention kernel, even where 16 tokens do not show it.
    align = 2
    while align <= WIDEST_ALIGN:
        widths = [multiple * align for multiple in _MULTIPLES]
        last = decoder.extend(0, tokens, align=align, logits=1).copy()  # a prefill's last chunk
        decoder.cache.truncate(0, 0)
        same = np.array_equal(last, whole[-1:])
        if same and np.array_equal(_logits(decoder, tokens, widths, align), whole):
            return align
        align *= 2
    return None


def _logits(decoder: Decoder, tokens: Sequence[int], widths: Sequence[int], align: int) -> Logits:
    """[S, V] logits of the tokens, cut into passes of the widths in turn."""
    parts, start = [], 0
    for width in cycle(widths):
        parts.append(decoder.extend(0, tokens[start : start + width], align=align).copy())
        start += width
        if start >= len(tokens):
            decoder.cache.truncate(0, 0)
            return np.concatenate(parts)
    raise AssertionError("a cycle does not end")
