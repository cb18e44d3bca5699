"""How long a pass may take, and how many tokens of prompts and draft models fit into it.

Each prompt token makes the pass longer for the requests that decode in it. So prompts get what
decoding leaves of the allowed inter-token latency, by the cost model, less a margin for its errors
in recent passes of this kind.
"""

from __future__ import annotations

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel

_SCATTER = 1 / 8  # weight of the newest pass in the mean deviation
_MARGIN = 6.5  # mean deviations: with this margin 1 pass in 100 is late
_UNKNOWN = 1 / 24  # mean deviation before a pass was seen
_MAX_ERROR = 1.0  # a pass that took more than twice the expected time counts as twice
_LONG = 0.5  # passes above this share of the aim say something about long passes
_MIN_SHARE = 1 / 3  # least time for prompts, as a share of the decoding tokens' own
MANY_ROWS = 1 << 20  # of logits: no bound
_MIN_TOKENS = 8  # about as many as the kernels compute at once


class PassBudget:
    """Divides the allowed inter-token latency.

    Args:
        cost_model: of the target's passes.
        draft_cost_model: of the passes of a draft model or head; None where there are none.
        max_batched_tokens: see `most_tokens`.
        most_rows: see there.
        max_inter_token_latency: longest pause in seconds that prompts may cause in a stream.

    Attributes:
        most_tokens: of a pass.
        most_rows: of logits in a pass, of requests that decode: what the memory plan counts.
    """

    def __init__(
        self,
        cost_model: CostModel,
        draft_cost_model: CostModel | None,
        *,
        max_batched_tokens: int,
        most_rows: int = MANY_ROWS,
        max_inter_token_latency: float,
    ) -> None:
        self._costs, self._draft_costs = cost_model, draft_cost_model
        self.most_tokens, self.most_rows = max_batched_tokens, most_rows
        self._longest_pause = max_inter_token_latency
        self._deviation = _UNKNOWN  # mean relative error of the cost model

    def observe(self, batch: Batch, step_seconds: float) -> None:
        """Learn from a step in which prompt tokens made other requests wait."""
        expected = self._cost(batch)
        if expected >= _LONG * self._target_step_seconds:
            error = min(abs(step_seconds / expected - 1), _MAX_ERROR)
            self._deviation += _SCATTER * (error - self._deviation)

    def pass_seconds(self, decoding: Batch, *, client_waits: bool, spent: float = 0.0) -> float:
        """Seconds that a pass may take with all prompts that join it.

        Args:
            decoding: the batch before the first prompt joins.
            client_waits: a client waits for the end of the pass.
            spent: seconds of the step before the pass.
        """
        if not client_waits:
            return float("inf")
        return max(self._target_step_seconds - spent, self.least_seconds(decoding))

    def least_seconds(self, decoding: Batch) -> float:
        """Minimum seconds for the pass where prompts wait, by the cost of `decoding` alone."""
        return self._cost(decoding) * (1 + _MIN_SHARE)

    def prompt_tokens(
        self, batch: Batch, position: int, seconds: float, *, first: bool, each: float = 0.0
    ) -> int:
        """Largest number of a prompt's tokens that may join a pass.

        Args:
            batch: the pass so far.
            position: position of the prompt's first token.
            seconds: time that the pass may take.
            first: no other prompt is in the pass. This one then gets a few tokens in any case.
            each: seconds that each of its tokens takes after the pass.
        """
        room = self.most_tokens - batch.num_tokens
        if seconds == float("inf"):
            return room
        work, allowed = batch.attention_work, seconds
        allowed -= self._costs.state_seconds(len(batch.spans) + 1)
        fitting = self._costs.tokens_within(
            allowed, batch.num_tokens, work, position, each=each, logits=batch.num_logits
        )
        return min(room, max(fitting, _MIN_TOKENS) if first else fitting)

    @property
    def usual_chunk(self) -> int:
        """Number of prompt tokens that join a pass where enough of them wait."""
        fitting = self._costs.tokens_within(self._target_step_seconds)
        return min(self.most_tokens, max(fitting, _MIN_TOKENS))

    def draft_model_tokens(self, decoding: int, position: int) -> int:
        """Largest number of tokens that a draft model may compute before a pass.

        Args:
            decoding: number of requests that wait for the pass.
            position: position of the first token.
        """
        if self._draft_costs is None:
            return 0
        own = self._costs.cost(decoding, spans=decoding)
        allowed = max(self._target_step_seconds - own, own * _MIN_SHARE)
        fitting = self._draft_costs.tokens_within(allowed, position=position)
        return min(self.most_tokens, max(fitting, _MIN_TOKENS))

    def _cost(self, batch: Batch) -> float:
        """Expected seconds of a pass."""
        count, work = batch.num_tokens, batch.attention_work
        return self._costs.cost(count, work, len(batch.spans), batch.num_logits)

    @property
    def _target_step_seconds(self) -> float:
        """Planned seconds of a step, so that hardly any step takes too long.

        A margin by mean deviations, as TCP sets its timeouts (Jacobson, Congestion Avoidance and
        Control, SIGCOMM 1988).
        """
        return self._longest_pause / (1 + _MARGIN * self._deviation)
