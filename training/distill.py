"""Distils the draft from the target: it learns the target's whole distribution, not the text.

The loss is the Kullback-Leibler divergence of the draft's next-token distribution from the
target's (Hinton et al., 2015). A third of the rows are the target's own continuations, since that
is what the draft will be asked to guess (DistillSpec, Zhou et al., 2023).
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint import load_model, save_model, set_up, trained_tokenizer
from training.data import Sampler
from training.model import Llama
from training.optim import Optimizer
from training.presets import PRESETS, Preset
from training.pretrain import CHECKPOINT_SECONDS, LONG_FROM, prepare
from training.runtime import (
    Budget,
    device,
    load_checkpoint,
    machine,
    restart_with_process_environment,
    save_checkpoint,
    stop_signal,
)
from training.samples import sample_target

MATRIX_LR, VECTOR_LR = 0.02, 0.005
# Rows per 16: the target's own continuations, the library's tests, and the rest library.
SAMPLED_ROWS, TEST_ROWS = 6, 2


class Distillation:
    """Draft, frozen target, optimizer, sampler and budget."""

    def __init__(
        self, preset: Preset, target: Llama, sampler: Sampler, budget: Budget, file: Path
    ) -> None:
        self.preset, self.sampler, self.budget, self.file = preset, sampler, budget, file
        self.device = device()
        self.target = target.to(self.device)
        self.draft = Llama(preset.draft).to(self.device)
        self.optimizer = Optimizer(self.draft, matrix_lr=MATRIX_LR, vector_lr=VECTOR_LR)
        self.divergence = torch.compile(self._divergence, dynamic=False)
        self.step = 0

    def _divergence(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mean divergence in nats, and how often both models' first choices agree."""
        with torch.no_grad():
            target_logits = self.target(tokens).float()
        draft_logits = self.draft(tokens).float()
        target_probs = target_logits.softmax(-1)
        cross_entropy = -(target_probs * draft_logits.log_softmax(-1)).sum(-1).mean()
        entropy = -(target_probs * target_logits.log_softmax(-1)).sum(-1).mean()
        agreement = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean()
        return cross_entropy - entropy, agreement

    def train_step(self) -> tuple[float, float]:
        """One batch; the divergence in nats per token and the agreement."""
        long = self.budget.progress >= LONG_FROM
        length, rows = self.preset.long if long else self.preset.short
        rows //= 2  # so small a model gains more from more steps than from larger ones
        counts = {"samples": rows * SAMPLED_ROWS // 16, "tests": rows * TEST_ROWS // 16}
        if not len(self.sampler.arrays["tests"]):
            counts["tests"] = 0
        counts["library"] = rows - sum(counts.values())
        batch = self.sampler.batch(counts, length)[:, :-1]
        with torch.autocast(self.device.type, torch.bfloat16):
            divergence, agreement = self.divergence(torch.from_numpy(batch).to(self.device))
        divergence.backward()
        self.optimizer.step(self.budget.progress)
        self.step += 1
        self.budget.spend(rows * length)
        return float(divergence.detach()), float(agreement)

    def save(self) -> None:
        """Write the checkpoint."""
        save_checkpoint(
            self.file,
            {
                "model": self.draft.state_dict(),
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
        self.draft.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.dealt = state["dealt"]
        self.step = state["step"]
        self.budget.tokens_done, self.budget.seconds_done = state["tokens"], state["seconds"]
        print(f"resumed at step {self.step}, {self.budget.progress:.1%} of the budget", flush=True)


def distill(
    preset: Preset,
    runs: Path,
    *,
    target_folder: Path,
    minutes: float | None,
    sample_tokens: int,
    seed: int,
    threads: int,
) -> Path:
    """Distil (or finish distilling) the draft; returns the folder of the finished model."""
    set_up(seed, threads)
    _, arrays = prepare(runs)
    tokenizer = trained_tokenizer(target_folder)
    samples = sample_target(
        target_folder, arrays["library"], sample_tokens, file=runs / "samples.npy", seed=seed
    )
    arrays = {**arrays, "samples": samples}
    budget = Budget(preset.draft_tokens, minutes)
    target = load_model(target_folder)
    run = Distillation(preset, target, Sampler(arrays, seed), budget, runs / "draft.pt")
    run.resume()
    print(f"{run.draft.parameter_count():,} parameters", flush=True)
    stop = stop_signal()
    budget.start()
    saved, smooth, agreed = time.monotonic(), math.nan, math.nan
    while budget.progress < 1:
        begun = budget.tokens_done, budget.seconds_done
        divergence, agreement = run.train_step()
        smooth = divergence if math.isnan(smooth) else 0.95 * smooth + 0.05 * divergence
        agreed = agreement if math.isnan(agreed) else 0.95 * agreed + 0.05 * agreement
        rate = (budget.tokens_done - begun[0]) / (budget.seconds_done - begun[1])
        print(
            f"step {run.step} divergence {divergence:.3f} smooth {smooth:.3f} agreement "
            f"{agreed:.1%} {rate:,.0f} tokens/s {budget.progress:.1%} "
            f"eta {budget.eta_minutes():.0f} min",
            flush=True,
        )
        if time.monotonic() - saved > CHECKPOINT_SECONDS or stop.is_set():
            run.save()
            saved = time.monotonic()
        if stop.is_set():
            raise SystemExit("stopped; the same command goes on from here")
    run.save()
    save_model(run.draft, tokenizer, runs / "draft")
    record = {
        "steps": run.step,
        "tokens": budget.tokens_done,
        "sampled_tokens": len(samples),
        "seconds": round(budget.seconds_done),
        "seed": seed,
        **machine(threads),
    }
    (runs / "draft.json").write_text(json.dumps(record, indent=2) + "\n")
    return runs / "draft"


def main() -> None:
    """Read the command line and distil."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default=device().type)
    parser.add_argument("--runs", type=Path, default=Path(__file__).parent / "runs")
    parser.add_argument("--target", type=Path, help="model folder (default: RUNS/target)")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--sample-tokens", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    folder = distill(
        PRESETS[options.preset],
        options.runs,
        target_folder=options.target or options.runs / "target",
        minutes=options.minutes,
        sample_tokens=options.sample_tokens,
        seed=options.seed,
        threads=options.threads,
    )
    print(f"draft written to {folder}")


if __name__ == "__main__":
    restart_with_process_environment("training.distill")
    main()
