"""Distils the draft from the target: it learns the target's whole distribution, not the text.

The loss is the Kullback-Leibler divergence of the draft's next-token distribution from the
target's (Hinton et al., 2015). A third of the rows are the target's own continuations, since that
is what the draft will be asked to guess (DistillSpec, Zhou et al., 2023).
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.checkpoint import load_model, set_up, trained_tokenizer
from training.data import Sampler
from training.loop import Training
from training.model import Llama
from training.presets import PRESETS, Preset
from training.pretrain import prepare
from training.runtime import Budget, device, restart_with_process_environment
from training.samples import sample_target

VECTOR_LR = 0.005
# Rows per 16: the target's own continuations, the library's tests, and the rest library.
SAMPLED_ROWS, TEST_ROWS = 6, 2


class Distillation(Training):
    """The draft in training, and the frozen target."""

    def __init__(
        self, preset: Preset, target: Llama, sampler: Sampler, budget: Budget, file: Path
    ) -> None:
        super().__init__(preset, Llama(preset.draft), sampler, budget, file, vector_lr=VECTOR_LR)
        self.target = target.to(self.device)

    def batch(self, length: int, rows: int) -> NDArray[np.int64]:
        """Half the rows: so small a model gains more from more steps than from larger ones."""
        rows //= 2
        counts = {"samples": rows * SAMPLED_ROWS // 16, "tests": rows * TEST_ROWS // 16}
        if not len(self.sampler.arrays["tests"]):
            counts["tests"] = 0
        counts["library"] = rows - sum(counts.values())
        return self.sampler.batch(counts, length)

    def losses(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mean divergence in nats, and how often both models' first choices agree."""
        tokens = tokens[:, :-1]
        with torch.no_grad():
            target_logits = self.target(tokens).float()
        draft_logits = self.model(tokens).float()
        target_probs = target_logits.softmax(-1)
        cross_entropy = -(target_probs * draft_logits.log_softmax(-1)).sum(-1).mean()
        entropy = -(target_probs * target_logits.log_softmax(-1)).sum(-1).mean()
        agreement = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean()
        return cross_entropy - entropy, agreement


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
    sampler = Sampler({**arrays, "samples": samples}, seed)
    budget = Budget(preset.draft_tokens, minutes)
    run = Distillation(preset, load_model(target_folder), sampler, budget, runs / "draft.pt")
    run.finish(
        lambda now, smooth: (
            f"divergence {now[0]:.3f} smooth {smooth[0]:.3f} agreement {smooth[1]:.1%}"
        )
    )
    run.write(tokenizer, runs / "draft", threads, sampled_tokens=len(samples))
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
