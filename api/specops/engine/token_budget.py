"""How many prompt tokens the next pass may take, so that running streams do not wait long.

Requests that decode get their tokens in every pass, and a pass takes the longer the more prompt
tokens are in it. So prompts get what the decoding tokens leave of the inter-token latency allowed,
by what passes are expected to cost. The bound is aimed at with a margin, by how far the last such
passes were off.
"""

from __future__ import annotations

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel

_SCATTER = 1 / 8  # weight of the newest pass in the mean deviation
_MARGIN = 6.5  # mean deviations by which 1 pass in 100 is late: few are, but by much
_UNKNOWN = 1 / 24  # mean deviation before a pass was seen
_MOST_ERROR = 1.0  # a pass that took longer than twice the time counts as twice the time
_LONG = 0.5  # of the time that is aimed at: shorter passes tell nothing of long ones
_LEAST_SHARE = 1 / 3  # of the decoding tokens' own time: where that is long, prompts still go on
_LEAST_TOKENS = 8  # a group of the kernels


class TokenBudget:
    """Chooses how much of prompts a pass computes. Used by the engine's thread.

    Args:
        cost_model: the target's.
        draft_cost_model: the draft model's; None without one.
        max_inter_token_latency: seconds between two tokens of a stream that prompts may cause.
        max_batched_tokens: most tokens of a pass.
    """

    def __init__(
        self,
        cost_model: CostModel,
        draft_cost_model: CostModel | None,
        *,
        max_inter_token_latency: float,
        max_batched_tokens: int,
    ) -> None:
        self._costs = cost_model
        self._draft_costs = draft_cost_model
        self._longest_pause = max_inter_token_latency
        self._most = max_batched_tokens
        self._deviation = _UNKNOWN

    def pass_seconds(self, decoding: Batch, *, watched: bool, spent: float = 0.0) -> float:
        """Seconds that a pass may last with all prompts that join it.

        Args:
            decoding: what is in it before the first of them.
            watched: a request that decodes in it streams its tokens.
            spent: seconds that the step has taken before the pass.
        """
        if not watched:
            return float("inf")
        own = self._costs.cost(decoding.num_tokens, decoding.attention_work)
        return max(self._aim - spent, own * (1 + _LEAST_SHARE))

    def prompt_tokens(self, batch: Batch, position: int, seconds: float, *, first: bool) -> int:
        """Most tokens of a prompt that may join a pass.

        Args:
            batch: what is in the pass already.
            position: of the prompt's first token.
            seconds: that the pass may last.
            first: no other prompt is in the pass: this one gets on however little time there is.
        """
        room = self._most - batch.num_tokens
        if seconds == float("inf"):
            return room
        work = batch.attention_work
        fitting = self._costs.tokens_within(seconds, batch.num_tokens, work, position)
        return min(room, max(fitting, _LEAST_TOKENS) if first else fitting)

    @property
    def usual_chunk(self) -> int:
        """Prompt tokens that join a pass where there are enough: as many as the bound allows."""
        fitting = self._costs.tokens_within(self._aim, 0, 0.0, 0)
        return min(self._most, max(fitting, _LEAST_TOKENS))

    def draft_model_tokens(self, decoding: int, position: int) -> int:
        """Most tokens that a draft model may take in before a pass.

        Args:
            decoding: requests that wait for the pass.
            position: of the first token.
        """
        if self._draft_costs is None:
            return 0
        own = self._costs.cost(decoding)
        allowed = max(self._aim - own, own * _LEAST_SHARE)
        fitting = self._draft_costs.tokens_within(allowed, 0, 0.0, position)
        return min(self._most, max(fitting, _LEAST_TOKENS))

    def observe(self, batch: Batch, step_seconds: float) -> None:
        """Take in a step with prompt tokens whose pass others waited for."""
        expected = self._costs.cost(batch.num_tokens, batch.attention_work)
        if expected >= _LONG * self._aim:
            error = min(abs(step_seconds / expected - 1), _MOST_ERROR)
            self._deviation += _SCATTER * (error - self._deviation)

    @property
    def _aim(self) -> float:
        """Seconds that a step is meant to last, so that hardly any lasts too long.

        A margin by mean deviations, as TCP sets its timeouts (Jacobson, Congestion Avoidance and
        Control, SIGCOMM 1988).
        """
        return self._longest_pause / (1 + _MARGIN * self._deviation)
