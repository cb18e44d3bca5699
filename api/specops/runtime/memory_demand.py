"""What there is of memory, and what loaded models want of it: what `memory_plan` weighs up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specops.config import Settings
from specops.system.memory import page_cache_room, read_memory

DEFAULT_SLOTS = 8  # where no other number is asked for
_FLOAT_BYTES = 4
_UNKNOWN_HIDDEN = 4096  # where a model's description does not say
# Activations of the widest layer, in hidden sizes: gate and up (2.7 each), their product, queries,
# keys, values and two residuals. ONNX Runtime frees each as soon as nothing needs it.
_HIDDEN_SIZES = 16


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
class ModelSizes:
    """What one loaded model takes.

    Attributes:
        kv_token_bytes: keys and values of one token.
        mapped_weights: bytes of weights in the page cache; 0: they are copied, and held already.
        hidden_size: width of its layers; 0: unknown.
        vocab_size: entries of its vocabulary.
    """

    kv_token_bytes: int
    mapped_weights: int
    hidden_size: int
    vocab_size: int

    def pass_bytes(self, tokens: int, logits: int) -> int:
        """What a pass takes while it runs: activations of all tokens, logits of some."""
        hidden = self.hidden_size or _UNKNOWN_HIDDEN
        return (tokens * hidden * _HIDDEN_SIZES + logits * self.vocab_size) * _FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class Demand:
    """What the loaded models want, in bytes; of draft and target together.

    Attributes:
        kv_token_bytes: keys and values of one token.
        mapped_weights: weights in the page cache.
        target_weights: those of them that are the target's, which every token takes.
        pass_bytes: what the largest pass takes while it runs.
        context: most tokens of a request, by the target.
    """

    kv_token_bytes: int
    mapped_weights: int
    target_weights: int
    pass_bytes: int
    context: int

    @classmethod
    def of(cls, settings: Settings, models: Sequence[ModelSizes], context: int) -> Demand:
        """What loaded models want under these settings.

        Args:
            settings: tokens of a pass, slots and draft tokens.
            models: the target first. The draft's cache has as many tokens as the target's.
            context: of the target.
        """
        verified = (settings.slots or DEFAULT_SLOTS) * (settings.max_k_draft + 1)
        tokens = max(settings.max_batched_tokens, verified)
        passes = [model.pass_bytes(tokens, verified) for model in models]
        return cls(
            kv_token_bytes=sum(model.kv_token_bytes for model in models),
            mapped_weights=sum(model.mapped_weights for model in models),
            target_weights=models[0].mapped_weights,
            pass_bytes=max(passes),  # one model computes at a time
            context=context,
        )
