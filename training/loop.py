"""Runs a training from the first step, or from its last checkpoint, to the end of its budget."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from specops.system.folders import atomic_file
from training.checkpoint import save_model
from training.data import Sampler
from training.optim import Optimizer
from training.presets import Preset
from training.runtime import Budget, device, machine, stop_signal

LONG_FROM = 0.8  # the last fifth has the full context, so that all positions are trained
CHECKPOINT_SECONDS = 180
MATRIX_LR = 0.02

Figures = tuple[float, ...]


class Training(ABC):
    """Model, optimizer, sampler and budget, saved and restored together.

    Args:
        preset: lengths and rows of a step.
        model: the model to train.
        sampler: draws the batches.
        budget: how long to train.
        file: the checkpoint's file.
        vector_lr: the learning rate of all parameters but the matrices.
    """

    def __init__(
        self,
        preset: Preset,
        model: LlamaForCausalLM,
        sampler: Sampler,
        budget: Budget,
        file: Path,
        *,
        vector_lr: float,
    ) -> None:
        self.preset, self.sampler, self.budget, self.file = preset, sampler, budget, file
        self.device = device()
        self.model = model.to(self.device)
        self.optimizer = Optimizer(self.model, matrix_lr=MATRIX_LR, vector_lr=vector_lr)
        self.compiled = torch.compile(self.losses, dynamic=False)
        self.step = 0

    @abstractmethod
    def batch(self, length: int, rows: int) -> NDArray[np.int64]:
        """The next step's tokens, [rows, length + 1]. It may have fewer rows than the preset."""

    @abstractmethod
    def losses(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """The loss in nats per token, and other figures for the progress line."""

    def train_step(self) -> Figures:
        """Learn from one batch; return its `losses`."""
        progress = self.budget.progress
        batch = self.batch(*(self.preset.long if progress >= LONG_FROM else self.preset.short))
        with torch.autocast(self.device.type, torch.bfloat16):
            losses = self.compiled(torch.from_numpy(batch).to(self.device))
        losses[0].backward()
        self.optimizer.step(progress)
        self.step += 1
        rows, tokens = batch.shape
        self.budget.spend(rows * (tokens - 1))
        return tuple(float(loss.detach()) for loss in losses)

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "dealt": self.sampler.dealt,
            "step": self.step,
            "tokens": self.budget.tokens_done,
            "seconds": self.budget.seconds_done,
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.file) as partial:
            torch.save(state, partial)

    def resume(self) -> None:
        """Continue from the checkpoint if there is one."""
        if not self.file.exists():
            return
        # Our own file, with the sampler's counters in addition to tensors.
        state = torch.load(self.file, weights_only=False)  # nosec B614
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.dealt = state["dealt"]
        self.step = state["step"]
        self.budget.tokens_done, self.budget.seconds_done = state["tokens"], state["seconds"]
        print(f"resumed at step {self.step}, {self.budget.progress:.1%} of the budget", flush=True)

    def finish(self, describe: Callable[[Figures, Figures], str]) -> None:
        """Train until the budget is spent, with a progress line per step.

        Args:
            describe: turns a step's `losses` and their moving averages into text.

        Raises:
            SystemExit: the process received a stop signal and has written a checkpoint.
        """
        self.resume()
        print(f"{self.model.num_parameters():,} parameters", flush=True)
        stop, budget = stop_signal(), self.budget
        budget.start()
        saved, smooth = time.monotonic(), Figures()
        while budget.progress < 1:
            begun = budget.tokens_done, budget.seconds_done
            figures = self.train_step()
            before = smooth or figures
            smooth = tuple(
                0.95 * old + 0.05 * new for old, new in zip(before, figures, strict=True)
            )
            rate = (budget.tokens_done - begun[0]) / (budget.seconds_done - begun[1])
            print(
                f"step {self.step} {describe(figures, smooth)} {rate:,.0f} tokens/s "
                f"{budget.progress:.1%} eta {budget.eta_minutes():.0f} min",
                flush=True,
            )
            if stop.is_set() or time.monotonic() - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = time.monotonic()
            if stop.is_set():
                raise SystemExit("stopped; the same command continues from here")
        self.save()

    def write(self, tokenizer: Tokenizer, folder: Path, threads: int, **tokens: int) -> None:
        """Write the model, and a record of the training next to its folder.

        Args:
            tokenizer: the model's tokenizer.
            folder: the model's folder.
            threads: number of threads of the training.
            tokens: numbers of training tokens, by name in the record.
        """
        save_model(self.model, tokenizer, folder)
        record = {
            "steps": self.step,
            "tokens": self.budget.tokens_done,
            "seconds": round(self.budget.seconds_done),
            "seed": self.sampler.seed,
            **tokens,
            **machine(threads),
        }
        folder.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
