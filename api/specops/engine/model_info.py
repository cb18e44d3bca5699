"""What a loaded model is, and how far its loading has come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from specops.runtime.cost_model import PrefillSpeed
from specops.sampling_defaults import SamplingDefaults

MIN_AGREEMENT = 0.02  # of a draft head: with less it is never right, or right by chance


class ModelState(StrEnum):
    """The stage of a model's life."""

    STARTING = "starting"
    DOWNLOADING = "downloading"
    CONVERTING = "converting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Download:
    """Progress of a download in bytes; `model` is `target` or `draft`."""

    model: str
    done: int
    total: int


class Report(Protocol):
    """Takes progress reports; with `download` while weights come in."""

    def __call__(self, state: ModelState, detail: str, download: Download | None = None) -> None:
        """Take notice."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the loaded models and their limits."""

    name: str
    quant: str
    parameters: int
    draft_parameters: int | None
    draft_quant: str | None
    drafters: tuple[str, ...]
    default_drafter: str
    vocab_size: int
    context: int  # tokens per request, prompt and output together
    slots: int  # requests that run at the same time, at most
    kv_tokens: int  # tokens in the target's KV cache, all requests together
    kv_bytes: int  # of all caches
    kv_dtype: str  # of a cache's elements
    threads: int
    kernels: str  # the variant used here, see `specops.runtime.kernels`
    ort_matmuls: tuple[str, ...]  # nodes whose products with weights ONNX Runtime computes
    chat: bool  # it answers messages; else it continues texts
    sampling: SamplingDefaults  # of requests that do not say it
    reading: PrefillSpeed  # of prompts, by the target
    end_tokens: frozenset[int] = frozenset()  # of texts
    system: str | None = None  # of conversations without a system message; None: the template's
    embedding_size: int = 0  # entries of an embedding; 0: its graph gives no hidden states
    state_bytes: int = 0  # of all slots' states in the target's layers without attention
    snapshot_bytes: int = 0  # of snapshots of it, at most
    weight_bytes: int = 0  # of target and draft, mapped
    head: Path | None = None  # a draft head's folder
    ngrams: Path | None = None  # a file with n-grams of the model's own texts
    head_agreement: float | None = None  # share of a test text that it guesses; None: no head

    @property
    def batch_invariant(self) -> bool:
        """Whether output has the same bits whatever else is in a pass."""
        return not self.ort_matmuls
