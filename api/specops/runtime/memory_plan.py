"""What of the memory cap goes where: decided at the start, before the KV cache is allocated.

The kernel kills for anonymous memory, not for the page cache. So what must fit is what cannot be
dropped: the process as it stands with its models loaded, the KV cache to its last block, and what
a pass needs while it runs. Mapped weights can be dropped and read again, for every token, at the
disk's speed: they should fit as well, and where no size was asked for, the tokens of the KV
cache are chosen so that they do. How many requests run at once follows from these tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specops.config import ConfigError, Settings
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.memory_demand import DEFAULT_SLOTS, Demand, ModelSizes, Supply

log = logging.getLogger(__name__)

_MIB = 1 << 20
_COMFORTABLE_CONTEXT = 1024  # tokens: a draft's weights leave memory before a cache is smaller
_LEAST_CONTEXT = 128  # tokens: less answers nothing
_SPARE_BYTES = 64 * _MIB  # Python's heap while requests come and go, thread stacks
_SPARE_SHARE = 0.02  # of the cap
_MOST_SPARE_BYTES = 256 * _MIB


class MemoryPlanError(ConfigError):
    """A KV cache that does not fit; the message has the numbers and what would fit."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A KV cache that fits, and what everything takes. See `plan_memory`.

    Attributes:
        slots: requests that run at the same time at most.
        context: most tokens of one request.
        kv_tokens: of all requests together; a multiple of a block's 64, and room for a context.
    """

    supply: Supply
    demand: Demand
    slots: int
    context: int
    kv_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks of each model's KV cache."""
        return self.kv_tokens // BLOCK_TOKENS

    @property
    def kv_bytes(self) -> int:
        """The KV cache, filled to the last token; its memory is taken as it fills."""
        return self.kv_tokens * self.demand.kv_token_bytes

    @property
    def needed(self) -> int:
        """Bytes that are not held yet and cannot be dropped once they are."""
        return self.kv_bytes + self.demand.pass_bytes + spare_bytes(self.supply.limit)

    @property
    def most_anonymous(self) -> int:
        """The most that is ever held and cannot be dropped."""
        return self.supply.held + self.needed

    @property
    def left_for_weights(self) -> int:
        """Bytes of mapped weights that stay in memory when all the rest is in use."""
        return max(0, self.supply.free - self.needed)

    @property
    def weights_fit(self) -> bool:
        """No weight is read from the disk twice."""
        return self.left_for_weights >= self.demand.mapped_weights

    def lines(self) -> Iterator[str]:
        """The plan as a table, line by line."""
        supply, demand = self.supply, self.demand
        cache = (
            f"{self.kv_tokens:,} tokens of {demand.kv_token_bytes / 1024:.1f} KB: up to "
            f"{self.slots} requests, each of {self.context:,} at most"
        )
        rows = [
            ("limit", supply.limit, f"{supply.source}; swap beside it: {_mb(supply.swap)}"),
            (
                "held now",
                supply.held,
                "the process, unmapped weights, what drafters keep",
            ),
            ("KV cache", self.kv_bytes, cache),
            ("a pass", demand.pass_bytes, "activations, logits"),
            ("spare", spare_bytes(supply.limit), "requests, threads"),
            ("anonymous", self.most_anonymous, "sum of these four: must stay below the limit"),
            ("mapped weights", demand.mapped_weights, self._weights_note()),
        ]
        for name, count, note in rows:
            yield f"{name:14} {_mb(count):>11}  {note}"

    def _weights_note(self) -> str:
        if self.weights_fit:
            return "in the page cache"
        room = f"room for {_mb(self.left_for_weights)}"
        if self.left_for_weights >= self.demand.target_weights:
            return f"{room}: the target's stay, the draft's come from disk when it drafts"
        return f"{room}: the rest comes from disk for every token"


def planned(
    settings: Settings, models: Sequence[ModelSizes], context: int, *, later_bytes: int = 0
) -> MemoryPlan:
    """Plan the KV cache of loaded models; the plan goes to the log.

    Args:
        settings: what was asked for.
        models: the target first.
        context: most tokens of a request, by the target.
        later_bytes: what fills up only as requests come, beside the KV cache.

    Raises:
        MemoryPlanError: see `plan_memory`.
        OSError: procfs is not readable.
    """
    plan = plan_memory(
        Supply.read().less(later_bytes),
        Demand.of(settings, models, context),
        slots=settings.slots,
        context=settings.context,
        kv_tokens=settings.kv_tokens,
    )
    for line in plan.lines():
        log.info("memory: %s", line)
    return plan


def plan_memory(
    supply: Supply,
    demand: Demand,
    *,
    slots: int = 0,
    context: int = 0,
    kv_tokens: int = 0,
) -> MemoryPlan:
    """Choose the KV cache, or check the one that was asked for.

    Args:
        supply: what there is.
        demand: what the models want.
        slots: requests at the same time at most; 0: `DEFAULT_SLOTS`.
        context: tokens of one request asked for; 0: all that the model can, or what fits.
        kv_tokens: tokens of all requests together; 0: a context for each slot, or what fits.

    Raises:
        MemoryPlanError: it does not fit, or not even the smallest cache does.
    """
    slots = slots or DEFAULT_SLOTS
    longest = min(context or demand.context, demand.context)
    wanted = _in_blocks(kv_tokens)
    least = longest if context else min(longest, wanted or _LEAST_CONTEXT, _LEAST_CONTEXT)

    def plan(tokens: int) -> MemoryPlan:
        return MemoryPlan(supply, demand, slots, min(longest, tokens), tokens)

    if kv_tokens:
        found = wanted if wanted <= _tokens_that_fit(supply, demand, 0) else 0
    else:
        wanted = _in_blocks(least)
        found = _chosen(supply, demand, slots * _in_blocks(longest), longest, least)
    if found >= least:
        return plan(found)
    raise MemoryPlanError(_refusal(plan(wanted), least))


def _chosen(supply: Supply, demand: Demand, most: int, longest: int, least: int) -> int:
    """Tokens of a cache that leaves the weights in memory; 0: none fits.

    All the weights, or at least the target's: a draft that has to be read again soon drafts no
    more. If not even these can stay, no more than one comfortable request.
    """
    comfortable = min(longest, _COMFORTABLE_CONTEXT)
    for weights, enough, limit in (
        (demand.mapped_weights, max(least, comfortable), most),
        (demand.target_weights, least, most),
        (0, least, max(_in_blocks(least), _in_blocks(comfortable))),
    ):
        tokens = min(limit, _tokens_that_fit(supply, demand, weights))
        if tokens >= enough:
            return tokens
    return 0


def _tokens_that_fit(supply: Supply, demand: Demand, weights: int) -> int:
    """Tokens of whole blocks that fit beside `weights` bytes of the page cache."""
    room = supply.free - weights - demand.pass_bytes - spare_bytes(supply.limit)
    return max(0, room // (demand.kv_token_bytes * BLOCK_TOKENS) * BLOCK_TOKENS)


def _in_blocks(tokens: int) -> int:
    """Tokens of the blocks that hold so many."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def spare_bytes(limit: int) -> int:
    """What stays free below a cap, whatever is planned."""
    return max(_SPARE_BYTES, min(int(limit * _SPARE_SHARE), _MOST_SPARE_BYTES))


def _refusal(plan: MemoryPlan, least: int) -> str:
    supply, demand = plan.supply, plan.demand
    if plan.needed <= supply.free:
        return (
            f"a request of SPECOPS_CONTEXT={least} does not fit into SPECOPS_KV_TOKENS="
            f"{plan.kv_tokens}: lower the first or raise the second"
        )
    fitting = _tokens_that_fit(supply, demand, 0)
    if fitting >= min(plan.context, _LEAST_CONTEXT):
        way_out = (
            f"{fitting:,} tokens would fit: lower SPECOPS_KV_TOKENS or SPECOPS_CONTEXT, or leave "
            "them out: the cache then takes what fits"
        )
    else:
        way_out = "Not even one short request fits: raise the memory limit or take a smaller model"
    return (
        f"a KV cache of {plan.kv_tokens:,} tokens does not fit: {_mb(plan.kv_bytes)} of keys and "
        f"values, {_mb(demand.pass_bytes)} for a pass and {_mb(spare_bytes(supply.limit))} to "
        f"spare make {_mb(plan.needed)}, but of the limit of {_mb(supply.limit)} ({supply.source}) "
        f"{_mb(supply.held)} are held and {_mb(supply.free)} are free. {way_out}"
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
