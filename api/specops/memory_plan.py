"""What of the memory cap goes where: decided at the start, before the KV cache is allocated.

The kernel kills for anonymous memory, not for the page cache. So what must fit is what cannot be
dropped: the process as it stands with its models loaded, the KV cache, and what a pass needs while
it runs. Mapped weights can be dropped and read again, for every token, at the disk's speed: they
should fit as well, and where nobody asked for a size, rows and context are chosen so that they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specops.config import ConfigError
from specops.memory import page_cache_room, read_memory

MOST_ROWS = 4  # where nobody asks for more: beyond it each row waits for the others
_MIB = 1 << 20
_COMFORTABLE_CONTEXT = 1024  # tokens: rows are given up before a context shorter than this
_LEAST_CONTEXT = 128  # tokens: less answers nothing
_STEP = 64  # contexts that are chosen here are multiples of it
_FLOAT_BYTES = 4
# Activations of the widest layer, in hidden sizes: gate and up (2.7 each), their product, queries,
# keys, values and two residuals. ONNX Runtime frees each as soon as nothing needs it.
_HIDDEN_SIZES = 16
_SPARE_BYTES = 64 * _MIB  # Python's heap while requests come and go, thread stacks
_SPARE_SHARE = 0.02  # of the cap
_MOST_SPARE_BYTES = 256 * _MIB


class MemoryPlanError(ConfigError):
    """Rows and context that do not fit; the message has the numbers and what would fit."""


@dataclass(frozen=True, slots=True)
class Supply:
    """What there is, in bytes.

    Attributes:
        limit: the cap.
        free: what can still be allocated below it.
        held: anonymous memory in use now: the process, and weights that are not mapped.
        swap: swap that may be used; the plan does not count on it.
        source: whose figures these are, see `memory.MemoryReading`.
    """

    limit: int
    free: int
    held: int
    swap: int
    source: str

    @classmethod
    def read(cls) -> Supply:
        """What there is now, once the models are loaded.

        Raises:
            OSError: procfs is not readable.
        """
        reading = read_memory()
        return cls(
            limit=reading.limit,
            free=page_cache_room(),
            held=reading.anon,
            swap=reading.swap_limit,
            source=reading.source,
        )

    def less(self, count: int) -> Supply:
        """The same when `count` bytes more are held: what fills up only as requests come."""
        return replace(self, free=max(0, self.free - count), held=self.held + count)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the loaded models want, in bytes; of draft and target together.

    Attributes:
        kv_token_bytes: keys and values of one token.
        mapped_weights: weights in the page cache.
        target_weights: those of them that are the target's, which every token takes.
        fixed_pass_bytes: what a pass takes however long the context is.
        context_pass_bytes: what a pass takes per token of the context.
        context: most tokens per row.
    """

    kv_token_bytes: int
    mapped_weights: int
    target_weights: int
    fixed_pass_bytes: int
    context_pass_bytes: int
    context: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Rows and context that fit, and what everything takes. See `plan_memory`."""

    supply: Supply
    demand: Demand
    rows: int
    context: int
    shrunk: bool = False  # less than what was asked for

    @property
    def kv_bytes(self) -> int:
        """The KV cache, filled to the last token."""
        return self.rows * self.context * self.demand.kv_token_bytes

    @property
    def pass_bytes(self) -> int:
        """What the widest pass takes while it runs."""
        return self.demand.fixed_pass_bytes + self.context * self.demand.context_pass_bytes

    @property
    def most_anonymous(self) -> int:
        """The most that is ever held and cannot be dropped."""
        return self.supply.held + self.kv_bytes + self.pass_bytes + spare_bytes(self.supply.limit)

    @property
    def left_for_weights(self) -> int:
        """Bytes of mapped weights that stay in memory when all the rest is in use."""
        spare = spare_bytes(self.supply.limit)
        return max(0, self.supply.free - self.kv_bytes - self.pass_bytes - spare)

    @property
    def weights_fit(self) -> bool:
        """No weight is read from the disk twice."""
        return self.left_for_weights >= self.demand.mapped_weights

    def lines(self) -> Iterator[str]:
        """The plan as a table, line by line."""
        supply, demand = self.supply, self.demand
        per_token = (
            f"{self.rows} x {self.context:,} tokens of {demand.kv_token_bytes / 1024:.1f} KB"
        )
        rows = [
            ("limit", supply.limit, f"{supply.source}; swap beside it: {_mb(supply.swap)}"),
            ("held now", supply.held, "the process, weights that are not mapped, shared n-grams"),
            ("KV cache", self.kv_bytes, per_token),
            ("a pass", self.pass_bytes, "activations, attention scores, logits"),
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
            return f"{room}: the target's stay, the draft's come from disk when it guesses"
        return f"{room}: the rest comes from disk for every token"


def plan_memory(
    supply: Supply, demand: Demand, *, rows: int = 0, context: int = 0, shrink: bool = False
) -> MemoryPlan:
    """Choose rows and context, or check those that were asked for.

    Args:
        supply: what there is.
        demand: what the models want.
        rows: rows asked for; 0: as many as fit, at most `MOST_ROWS`.
        context: tokens per row asked for; 0: all that the model can, or what fits.
        shrink: where what was asked for does not fit, take less instead of refusing.

    Raises:
        MemoryPlanError: it does not fit, or not even the smallest cache does.
    """
    longest = min(context or demand.context, demand.context)
    if rows and context:
        plan = MemoryPlan(supply, demand, rows, longest)
        if _fits(plan):
            return plan
    else:
        # Chosen so that the weights stay in memory too, or at least the target's: a draft that
        # has to be read again soon guesses no more. If they cannot, no larger than is useful.
        modest = longest if context else min(longest, _COMFORTABLE_CONTEXT)
        for weights, most_rows, most_context in (
            (demand.mapped_weights, MOST_ROWS, longest),
            (demand.target_weights, 1, modest),
            (0, 1, modest),
        ):
            choices = _choices(rows, most_rows, most_context, fixed=bool(context))
            if (found := _first(supply, demand, weights, choices, most_context)) is not None:
                return found
        plan = MemoryPlan(supply, demand, rows or 1, longest if context else _least(longest))
    if shrink:
        choices = _choices(0, rows or MOST_ROWS, longest, fixed=False)
        if (smaller := _first(supply, demand, 0, choices, longest)) is not None:
            return replace(smaller, shrunk=True)
    raise MemoryPlanError(_refusal(plan))


def _choices(rows: int, most_rows: int, longest: int, *, fixed: bool) -> Iterator[tuple[int, int]]:
    """Numbers of rows, each with the context that they need to be worth it, the best first.

    Args:
        rows: the number that it must be; 0: any up to `most_rows`.
        most_rows: see `rows`.
        longest: the context to have at most, or, where `fixed`, exactly.
        fixed: whether a shorter context will not do.
    """
    enough = longest if fixed else min(longest, _COMFORTABLE_CONTEXT)
    for number in [rows] if rows else range(most_rows, 0, -1):
        yield number, enough
    if not fixed:
        yield rows or 1, _least(longest)


def _first(
    supply: Supply,
    demand: Demand,
    weights: int,
    choices: Iterator[tuple[int, int]],
    longest: int,
) -> MemoryPlan | None:
    """The first of the choices that fits beside `weights` bytes of the page cache."""
    for rows, enough in choices:
        tokens = _context_that_fits(supply, demand, weights, rows, longest)
        if tokens >= enough:
            return MemoryPlan(supply, demand, rows, tokens)
    return None


def _context_that_fits(
    supply: Supply, demand: Demand, weights: int, rows: int, longest: int
) -> int:
    """Tokens per row that fit into what is left, at most `longest`; 0 or less where none do."""
    room = supply.free - weights - demand.fixed_pass_bytes - spare_bytes(supply.limit)
    tokens = room // (rows * demand.kv_token_bytes + demand.context_pass_bytes)
    return longest if tokens >= longest else tokens // _STEP * _STEP


def _least(longest: int) -> int:
    return min(longest, _LEAST_CONTEXT)


def _fits(plan: MemoryPlan) -> bool:
    needed = plan.kv_bytes + plan.pass_bytes + spare_bytes(plan.supply.limit)
    return needed <= plan.supply.free


def spare_bytes(limit: int) -> int:
    """What stays free below a cap, whatever is planned."""
    return max(_SPARE_BYTES, min(int(limit * _SPARE_SHARE), _MOST_SPARE_BYTES))


def pass_bytes(*, width: int, hidden: int, heads: int, vocab: int, logits: int) -> tuple[int, int]:
    """What a pass takes while it runs.

    Args:
        width: tokens of the pass.
        hidden: the model's hidden size.
        heads: its query heads.
        vocab: entries of its vocabulary.
        logits: tokens of the pass that get logits.

    Returns:
        Bytes that every such pass takes, and bytes per token of the context (the scores that
        GroupQueryAttention computes: width x heads x context floats).
    """
    fixed = width * hidden * _HIDDEN_SIZES + logits * vocab
    return fixed * _FLOAT_BYTES, scores_bytes(width, heads)


def scores_bytes(width: int, heads: int) -> int:
    """Bytes of a layer's attention scores in a pass of `width` tokens, per token of the context."""
    return width * heads * _FLOAT_BYTES


def _refusal(plan: MemoryPlan) -> str:
    supply, demand = plan.supply, plan.demand
    needed = plan.kv_bytes + plan.pass_bytes + spare_bytes(supply.limit)
    one_row = _context_that_fits(supply, demand, 0, 1, demand.context)
    if one_row >= _least(demand.context):
        way_out = (
            f"One row of {one_row:,} tokens would fit: lower SPECOPS_ROWS or SPECOPS_CONTEXT, "
            "leave them out, or set SPECOPS_MEMORY_FIT=shrink"
        )
    else:
        way_out = "Not even one short row fits: raise the memory limit or take a smaller model"
    return (
        f"{plan.rows} rows of {plan.context:,} tokens do not fit: {_mb(plan.kv_bytes)} of KV "
        f"cache, {_mb(plan.pass_bytes)} for a pass and {_mb(spare_bytes(supply.limit))} to spare "
        f"make {_mb(needed)}, but of the limit of {_mb(supply.limit)} ({supply.source}) "
        f"{_mb(supply.held)} are held and {_mb(supply.free)} are free. {way_out}"
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
