"""Computes how long a prompt would take alone, from the pass costs that the API publishes.

A time to the first token says little if a prompt may have 20 tokens or 4,000, some of them cached.
Divided by the prompt's time alone, it is the slowdown that other requests cause. The API measures
the costs itself and publishes them as `specops_pass_cost_seconds` in `/metrics`, so the load test
need not send anything.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_COST = re.compile(
    r'^specops_pass_cost_seconds\{kind="(tokens|attention)",size="(\d+)"\} (\S+)$', re.MULTILINE
)
_PAIRS = 1_000_000  # the published cost of attention is for this many pairs of tokens


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of passes by number of tokens, ascending, and seconds of a pair in attention."""

    passes: Sequence[tuple[int, float]]
    pair: float

    @classmethod
    def read(cls, metrics: str) -> PassCosts | None:
        """The costs in the text of `/metrics`; None if it has none."""
        found = [(kind, int(size), float(cost)) for kind, size, cost in _COST.findall(metrics)]
        passes = sorted((size, cost) for kind, size, cost in found if kind == "tokens")
        pair = max((cost / _PAIRS for kind, _, cost in found if kind == "attention"), default=0.0)
        return cls(passes, pair) if passes else None

    def alone(self, new: int, known: int) -> float:
        """Seconds of `new` prompt tokens after `known` cached ones."""
        widest, whole = self.passes[-1]
        full, rest = divmod(new, widest)
        pairs = new * known + new * (new + 1) / 2
        return full * whole + (self._one(rest) if rest else 0.0) + pairs * self.pair

    def _one(self, tokens: int) -> float:
        """Seconds of one pass, interpolated between measured ones."""
        above = bisect_left(self.passes, (tokens, 0.0))
        wide, slow = self.passes[above]
        narrow, fast = self.passes[max(0, above - 1)]
        share = (tokens - narrow) / (wide - narrow) if wide > narrow else 0.0
        return fast + share * (slow - fast)
