"""Divides the memory below the cap at the start, before the KV cache is allocated.

The kernel kills a process for its anonymous memory, not for the page cache. So all memory that
cannot be dropped must fit: the process with its models loaded, the whole KV cache, and the memory
of a running pass. Mapped weights can be dropped and read again, but then every token waits for the
disk. So they should fit, too: unless the settings ask for a size, the plan chooses the size of the
KV cache so that the weights stay in memory. That size limits how many requests run at once.
Snapshots of states only save work, so they get part of the rest, and are the first to give way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from specops.config import ConfigError, Settings
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.kvcache.recurrent_state import max_snapshots
from specops.system.allocator import give_back
from specops.system.memory import MemoryReading, page_cache_room, read_memory

log = logging.getLogger(__name__)

DEFAULT_SLOTS = 8
_FLOAT_BYTES = 4
_UNKNOWN_HIDDEN = 4096  # hidden size of a model whose description does not give one
# Activations of the widest layer, in hidden sizes: gate and up (2.7 each), their product, queries,
# keys, values and two residuals. ONNX Runtime frees each as soon as nothing needs it.
_HIDDEN_SIZES = 16
_MIB = 1 << 20
_COMFORTABLE_CONTEXT = 1024  # tokens: below this, the plan rather evicts the draft's weights
_MIN_CONTEXT = 128  # tokens: a smaller cache is useless
PROMPT_ROWS = 8
"""Rows of logits in a pass for prompts, in addition to those for decoding requests."""
# For the logits of decoding requests, but at least two rows per slot. With a large vocabulary, long
# drafts of all slots at once are not worth more memory.
_MAX_LOGIT_BYTES = 32 * _MIB
# For the operating system and the program's files: if the weights fit to the byte, pages evict each
# other, and each pass reads all weights from the disk.
_BESIDE_WEIGHTS_BYTES = 32 * _MIB
_SPARE_BYTES = 36 * _MIB  # request bodies, texts being tokenized, compiled grammars, heap
_SPARE_SHARE = 0.02  # of the cap
_MAX_SPARE_BYTES = 256 * _MIB
_COMPILED_SHARE = 4  # compiled grammars get a quarter of the spare memory
_SNAPSHOT_SHARE = 4  # snapshots get a quarter of the memory for KV cache and snapshots


class MemoryPlanError(ConfigError):
    """The KV cache does not fit; the message has the numbers and says what would fit."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """The available memory, in bytes.

    Attributes:
        reading: the limit, and the swap, which the plan does not use.
        free: memory that can still be allocated below the limit.
        held: anonymous memory in use: the process, and weights that are not mapped.
    """

    reading: MemoryReading
    free: int
    held: int

    @classmethod
    def read(cls) -> AvailableMemory:
        """Read the figures, once the models are loaded and the heap's free memory is returned.

        Raises:
            OSError: procfs is not readable.
        """
        give_back()  # 300 MB after loading a tokenizer of 262,144 tokens
        reading = read_memory()
        return cls(reading, page_cache_room(), reading.anon)

    def less(self, count: int) -> AvailableMemory:
        """The available memory with `count` bytes set aside for memory that requests will fill."""
        return replace(self, free=max(0, self.free - count), held=self.held + count)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a loaded model that the plan needs.

    Attributes:
        kv_token_bytes: bytes of one token's keys and values.
        mapped_weights: bytes of weights in the page cache; 0: the process holds a copy instead.
        hidden_size: width of the layers; 0: unknown.
        vocab_size: size of the vocabulary.
        slot_bytes: bytes of the recurrent states of a slot.
    """

    kv_token_bytes: int
    mapped_weights: int
    hidden_size: int
    vocab_size: int
    slot_bytes: int = 0

    def rows(self, most: int, least: int) -> int:
        """Maximum rows of logits in a pass: `most`, or fewer if they take much memory."""
        few = _MAX_LOGIT_BYTES // max(1, self.vocab_size * _FLOAT_BYTES)
        return min(most, max(least, few))

    def pass_bytes(self, tokens: int, logits: int) -> int:
        """Bytes of a running pass with `tokens` tokens and `logits` rows of logits."""
        hidden = self.hidden_size or _UNKNOWN_HIDDEN
        return (tokens * hidden * _HIDDEN_SIZES + logits * self.vocab_size) * _FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class RequiredMemory:
    """The memory that target and draft model need together, in bytes.

    Attributes:
        kv_token_bytes: keys and values of one token.
        mapped_weights: weights in the page cache.
        target_weights: the target's part of them, which every token needs.
        pass_bytes: memory of the largest running pass.
        context: the target's maximum number of tokens per request.
        state_bytes: recurrent states of all slots, without snapshots.
        most_snapshot_bytes: memory of as many snapshots as are useful.
        grammar_bytes: memory that grammars need before the first request; 0: no grammars.
        rows: maximum rows of the target's logits for decoding requests in a pass.
    """

    kv_token_bytes: int
    mapped_weights: int
    target_weights: int
    pass_bytes: int
    context: int
    state_bytes: int = 0
    most_snapshot_bytes: int = 0
    grammar_bytes: int = 0
    rows: int = 0

    @classmethod
    def of(
        cls,
        settings: Settings,
        models: Sequence[ModelSizes],
        context: int,
        grammar_bytes: int = 0,
    ) -> RequiredMemory:
        """The memory that loaded models need.

        Args:
            settings: the numbers of slots, of draft tokens and of tokens in a pass.
            models: the target first. The draft's cache has as many tokens as the target's.
            context: the target's maximum number of tokens per request.
            grammar_bytes: see `RequiredMemory`.
        """
        slots = settings.slots or DEFAULT_SLOTS
        verified = slots * (settings.max_k_draft + 1)
        rows = [model.rows(verified, 2 * slots) for model in models]
        slot_bytes = sum(model.slot_bytes for model in models)
        shares = settings.prefix_cache != PrefixSharing.OFF
        tokens = max(settings.max_batched_tokens, verified)
        return cls(
            kv_token_bytes=sum(model.kv_token_bytes for model in models),
            mapped_weights=sum(model.mapped_weights for model in models),
            target_weights=models[0].mapped_weights,
            # One model computes at a time.
            pass_bytes=max(
                model.pass_bytes(tokens, count + PROMPT_ROWS)
                for model, count in zip(models, rows, strict=True)
            ),
            context=context,
            rows=rows[0],
            state_bytes=slots * slot_bytes,
            most_snapshot_bytes=max_snapshots(slots) * slot_bytes if shares else 0,
            grammar_bytes=grammar_bytes,
        )

    @property
    def beside_cache(self) -> int:
        """Bytes that requests need regardless of the size of the KV cache."""
        return self.pass_bytes + self.state_bytes + self.grammar_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A KV cache that fits, and the memory of everything else. See `plan_memory`.

    Attributes:
        available: the available memory.
        required: the memory that the models need.
        slots: maximum number of concurrent requests.
        context: maximum number of tokens per request.
        kv_tokens: tokens of all requests together; a multiple of a block's 64, at least `context`.
        snapshot_bytes: maximum memory of the snapshots of states.
    """

    available: AvailableMemory
    required: RequiredMemory
    slots: int
    context: int
    kv_tokens: int
    snapshot_bytes: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks in each model's KV cache."""
        return self.kv_tokens // BLOCK_TOKENS

    @property
    def kv_bytes(self) -> int:
        """Bytes of the full KV cache, which takes memory only as it fills."""
        return self.kv_tokens * self.required.kv_token_bytes

    @property
    def needed(self) -> int:
        """Bytes that the process will need in addition, and cannot drop."""
        rest = self.required.beside_cache + spare_bytes(self.available.reading.limit)
        return self.kv_bytes + self.snapshot_bytes + rest

    @property
    def most_anonymous(self) -> int:
        """Peak bytes that the process holds and cannot drop."""
        return self.available.held + self.needed

    @property
    def compiled_bytes(self) -> int:
        """Bytes of the spare memory that compiled grammars may use."""
        return spare_bytes(self.available.reading.limit) // _COMPILED_SHARE

    @property
    def left_for_weights(self) -> int:
        """Bytes of mapped weights that stay in memory when everything else is in use."""
        return max(0, self.available.free - self.needed - _BESIDE_WEIGHTS_BYTES)

    @property
    def weights_fit(self) -> bool:
        """Whether all weights stay in memory."""
        return self.left_for_weights >= self.required.mapped_weights

    def lines(self) -> Iterator[str]:
        """Yield the lines of the plan's table."""
        reading, required = self.available.reading, self.required
        cache = (
            f"{self.kv_tokens:,} tokens of {required.kv_token_bytes / 1024:.1f} KB: up to "
            f"{self.slots} requests of at most {self.context:,} each"
        )
        rows = [
            ("limit", reading.limit, reading.limit_note),
            ("swap", reading.swap_limit, reading.swap_note),
            ("held now", self.available.held, "the process, unmapped weights, drafters' memory"),
            ("KV cache", self.kv_bytes, cache),
            ("states", required.state_bytes, "of all slots, in layers without attention"),
            ("snapshots", self.snapshot_bytes, "copies of states, for later requests"),
            ("a pass", required.pass_bytes, "activations, logits"),
            ("grammars", required.grammar_bytes, "their library's vocabulary, and a process"),
            ("spare", spare_bytes(reading.limit), "requests, threads"),
            ("anonymous", self.most_anonymous, "sum of these; must stay below the limit"),
            ("mapped weights", required.mapped_weights, self._weights_note()),
        ]
        for name, count, note in rows:
            if not required.state_bytes and name in ("states", "snapshots"):
                continue
            yield f"{name:14} {_mb(count):>11}  {note}"

    def _weights_note(self) -> str:
        if self.weights_fit:
            return "in the page cache"
        room = f"room for {_mb(self.left_for_weights)}"
        if self.left_for_weights >= self.required.target_weights:
            return f"{room}: the target's stay, the draft's come from disk when it drafts"
        return f"{room}: the rest comes from disk for every token"


def plan_for_models(
    settings: Settings,
    models: Sequence[ModelSizes],
    context: int,
    *,
    later_bytes: int = 0,
    grammar_bytes: int = 0,
) -> MemoryPlan:
    """Plan the KV cache of loaded models and log the plan.

    If the cache fits only without grammars, the plan has none.

    Args:
        settings: the user's settings.
        models: the target first.
        context: the target's maximum number of tokens per request.
        later_bytes: bytes outside the KV cache that requests fill over time.
        grammar_bytes: see `RequiredMemory`.

    Raises:
        MemoryPlanError: see `plan_memory`.
        OSError: procfs is not readable.
    """
    planned = partial(
        plan_memory,
        AvailableMemory.read().less(later_bytes),
        slots=settings.slots,
        context=settings.context,
        kv_tokens=settings.kv_tokens,
    )
    try:
        plan = planned(RequiredMemory.of(settings, models, context, grammar_bytes))
    except MemoryPlanError:
        plan = planned(RequiredMemory.of(settings, models, context))
    for line in plan.lines():
        log.info("memory: %s", line)
    return plan


def plan_memory(
    available: AvailableMemory,
    required: RequiredMemory,
    *,
    slots: int = 0,
    context: int = 0,
    kv_tokens: int = 0,
) -> MemoryPlan:
    """Choose the size of the KV cache, or check the requested size.

    Args:
        available: the available memory.
        required: the memory that the models need.
        slots: maximum number of concurrent requests; 0: `DEFAULT_SLOTS`.
        context: requested tokens of one request; 0: the model's context, or as many as fit.
        kv_tokens: requested tokens of all requests together; 0: a context for each slot, or as many
            as fit.

    Raises:
        MemoryPlanError: the requested cache does not fit, or not even the smallest one does.
    """
    slots = slots or DEFAULT_SLOTS
    longest = min(context or required.context, required.context)
    if kv_tokens:
        smallest = _in_blocks(kv_tokens)
        if context and smallest < longest:
            raise MemoryPlanError(
                f"a request of SPECOPS_CONTEXT={longest} does not fit into SPECOPS_KV_TOKENS="
                f"{smallest}: lower the first or raise the second"
            )
        choices = [(0, smallest, smallest)]
    else:
        least = longest if context else min(longest, _MIN_CONTEXT)
        comfortable = max(least, min(longest, _COMFORTABLE_CONTEXT))
        smallest, most = _in_blocks(least), slots * _in_blocks(longest)
        # The first choice keeps all weights in memory. The second keeps the target's: a draft model
        # that has to be read from the disk soon drafts no more. If not even the target's can stay,
        # the third choice has room for one comfortable request.
        choices = [
            (required.mapped_weights + _BESIDE_WEIGHTS_BYTES, comfortable, most),
            (required.target_weights + _BESIDE_WEIGHTS_BYTES, least, most),
            (0, least, _in_blocks(comfortable)),
        ]
    for weights, enough, limit in choices:
        if _tokens_that_fit(available, required, weights) >= enough:
            snapshots = _snapshot_bytes(available, required, enough, limit)
            tokens = min(limit, _tokens_that_fit(available, required, weights + snapshots))
            context = min(longest, tokens)
            return MemoryPlan(available, required, slots, context, tokens, snapshots)
    plan = MemoryPlan(available, required, slots, min(longest, smallest), smallest)
    raise MemoryPlanError(_refusal(plan))


def _room(available: AvailableMemory, required: RequiredMemory) -> int:
    """Bytes for KV cache, snapshots and weights."""
    return available.free - required.beside_cache - spare_bytes(available.reading.limit)


def _tokens_that_fit(available: AvailableMemory, required: RequiredMemory, others: int) -> int:
    """Number of tokens, in whole blocks, that fit if weights and snapshots take `others` bytes."""
    room = _room(available, required) - others
    return max(0, room // (required.kv_token_bytes * BLOCK_TOKENS) * BLOCK_TOKENS)


def _snapshot_bytes(
    available: AvailableMemory, required: RequiredMemory, enough: int, limit: int
) -> int:
    """Bytes left for snapshots with all weights and a KV cache of `enough` to `limit` tokens."""
    room = _room(available, required) - required.mapped_weights - _BESIDE_WEIGHTS_BYTES
    share = max(room // _SNAPSHOT_SHARE, room - limit * required.kv_token_bytes)
    least = _in_blocks(enough) * required.kv_token_bytes
    return max(0, min(share, room - least, required.most_snapshot_bytes))


def _in_blocks(tokens: int) -> int:
    """Round a number of tokens up to whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def spare_bytes(limit: int) -> int:
    """Bytes below a limit that every plan leaves free."""
    return max(_SPARE_BYTES, min(int(limit * _SPARE_SHARE), _MAX_SPARE_BYTES))


def _refusal(plan: MemoryPlan) -> str:
    available, required, limit = plan.available, plan.required, plan.available.reading.limit
    fitting = _tokens_that_fit(available, required, 0)
    states = f"{_mb(required.state_bytes)} for states, " if required.state_bytes else ""
    if fitting >= min(plan.context, _MIN_CONTEXT):
        way_out = (
            f"{fitting:,} tokens would fit: lower SPECOPS_KV_TOKENS or SPECOPS_CONTEXT, or leave "
            "them out: the cache then takes what fits"
        )
    else:
        way_out = "Not even one short request fits: raise the memory limit or take a smaller model"
    return (
        f"a KV cache of {plan.kv_tokens:,} tokens does not fit: it takes {_mb(plan.kv_bytes)} of "
        f"keys and values, {states}{_mb(required.pass_bytes)} for a pass and "
        f"{_mb(spare_bytes(limit))} to spare, {_mb(plan.needed)} in all. Of the limit of "
        f"{_mb(limit)} ({available.reading.limit_note}), {_mb(available.held)} are in use and "
        f"{_mb(available.free)} are free. {way_out}"
    )


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
