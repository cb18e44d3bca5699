"""Trains the target on the next token, resumable, with a line of progress per step.

`python -m training.pretrain --minutes 80` plans the learning rate for 80 minutes of training
time and ends when they are over; without it the preset's tokens are the plan.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from tokenizers import Tokenizer
from torch import Tensor

from training.checkpoint import save_model, set_up
from training.corpus import load_corpus
from training.data import Sampler, rows_of_tests, token_arrays
from training.model import Llama
from training.optim import Optimizer
from training.presets import PRESETS, Preset
from training.runtime import (
    Budget,
    device,
    load_checkpoint,
    machine,
    restart_with_process_environment,
    save_checkpoint,
    stop_signal,
)
from training.tokenizer import train_tokenizer

LONG_FROM = 0.8  # the last fifth is trained at the full context, so that all positions are valid
CHECKPOINT_SECONDS = 180
MATRIX_LR, VECTOR_LR = 0.02, 0.003


def prepare(runs: Path) -> tuple[Tokenizer, dict[str, np.ndarray]]:
    """The tokenizer (trained once on the library) and the token arrays."""
    corpus = load_corpus()
    file = runs / "tokenizer.json"
    if not file.exists():
        runs.mkdir(parents=True, exist_ok=True)
        train_tokenizer(document.text for document in corpus.library).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    return tokenizer, token_arrays(tokenizer, corpus, runs / "tokens")


def bytes_per_token(tokenizer: Tokenizer, tokens: np.ndarray) -> float:
    """Mean bytes of a token in `tokens`; turns a loss into bits per byte for the progress line."""
    sample = tokens[: 1 << 18].tolist()
    return len(tokenizer.decode(sample).encode("utf-8")) / len(sample)


class Target:
    """The target in training: model, optimizer, sampler and budget, saved and restored together."""

    def __init__(self, preset: Preset, sampler: Sampler, budget: Budget, file: Path) -> None:
        self.preset, self.sampler, self.budget, self.file = preset, sampler, budget, file
        self.device = device()
        self.model = Llama(preset.target).to(self.device)
        self.optimizer = Optimizer(self.model, matrix_lr=MATRIX_LR, vector_lr=VECTOR_LR)
        self.loss = torch.compile(self._loss, dynamic=False)
        self.step = 0

    def _loss(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def train_step(self) -> float:
        """One batch; the loss in nats per token."""
        progress = self.budget.progress
        length, rows = self.preset.long if progress >= LONG_FROM else self.preset.short
        tests = rows_of_tests(progress, rows) if len(self.sampler.arrays["tests"]) else 0
        batch = self.sampler.batch({"tests": tests, "library": rows - tests}, length)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(torch.from_numpy(batch).to(self.device))
        loss.backward()
        self.optimizer.step(progress)
        self.step += 1
        self.budget.spend(rows * length)
        return float(loss.detach())

    def save(self) -> None:
        """Write the checkpoint."""
        save_checkpoint(
            self.file,
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "dealt": self.sampler.dealt,
                "step": self.step,
                "tokens": self.budget.tokens_done,
                "seconds": self.budget.seconds_done,
            },
        )

    def resume(self) -> None:
        """Go on from the checkpoint if there is one."""
        state = load_checkpoint(self.file)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.dealt = state["dealt"]
        self.step = state["step"]
        self.budget.tokens_done, self.budget.seconds_done = state["tokens"], state["seconds"]
        print(f"resumed at step {self.step}, {self.budget.progress:.1%} of the budget", flush=True)


def train(preset: Preset, runs: Path, *, minutes: float | None, seed: int, threads: int) -> Path:
    """Train (or finish training) the target; returns the folder of the finished model."""
    set_up(seed, threads)
    tokenizer, arrays = prepare(runs)
    sizes = {name: bytes_per_token(tokenizer, a) for name, a in arrays.items() if len(a)}
    budget = Budget(preset.target_tokens, minutes)
    target = Target(preset, Sampler(arrays, seed), budget, runs / "target.pt")
    target.resume()
    print(f"{target.model.parameter_count():,} parameters", flush=True)
    budget.start()
    saved, smooth = time.monotonic(), math.nan
    stop = stop_signal()
    while budget.progress < 1:
        begun = budget.tokens_done, budget.seconds_done
        loss = target.train_step()
        smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
        rate = (budget.tokens_done - begun[0]) / (budget.seconds_done - begun[1])
        print(
            f"step {target.step} loss {loss:.3f} smooth {smooth:.3f} "
            f"bits/byte ~{smooth / math.log(2) / sizes['library']:.3f} "
            f"{rate:,.0f} tokens/s {budget.progress:.1%} eta {budget.eta_minutes():.0f} min",
            flush=True,
        )
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            target.save()
            save_model(target.model, tokenizer, runs / "interim" / "target")
            saved = time.monotonic()
        if stop.is_set():
            target.save()
            raise SystemExit("stopped; the same command goes on from here")
    target.save()
    save_model(target.model, tokenizer, runs / "target")
    record = {
        "steps": target.step,
        "tokens": budget.tokens_done,
        "seconds": round(budget.seconds_done),
        "seed": seed,
        "library_tokens": len(arrays["library"]),
        "test_tokens": len(arrays["tests"]),
        **machine(threads),
    }
    (runs / "target.json").write_text(json.dumps(record, indent=2) + "\n")
    return runs / "target"


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default=device().type)
    parser.add_argument("--runs", type=Path, default=Path(__file__).parent / "runs")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    folder = train(
        PRESETS[options.preset],
        options.runs,
        minutes=options.minutes,
        seed=options.seed,
        threads=options.threads,
    )
    print(f"target written to {folder}")


if __name__ == "__main__":
    restart_with_process_environment("training.pretrain")
    main()
