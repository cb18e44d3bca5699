"""Distils the draft from the target: it learns the target's distribution, not only the text.

The loss is the Kullback-Leibler divergence of the draft's next-token distribution from the
target's (Hinton et al., 2015). A third of the rows are continuations by the target, because the
draft will have to predict those (DistillSpec, Zhou et al., 2023).
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaForCausalLM

from training.checkpoint import load_model, new_model, set_up, trained_tokenizer
from training.data import Sampler
from training.files import RUNS, options
from training.loop import Training
from training.presets import PRESETS, Preset
from training.pretrain import prepare
from training.runtime import Budget, device
from training.samples import sample_target

VECTOR_LR = 0.005
SAMPLED_TOKENS = 500_000
# Rows of 16: the target's continuations, and the library's tests; the rest are library text.
SAMPLED_ROWS, TEST_ROWS = 6, 2


class Distillation(Training):
    """Trains the draft from the frozen target."""

    def __init__(
        self,
        preset: Preset,
        target: LlamaForCausalLM,
        sampler: Sampler,
        budget: Budget,
        file: Path,
    ) -> None:
        draft = new_model(preset.draft)
        super().__init__(preset, draft, sampler, budget, file, vector_lr=VECTOR_LR)
        self.target = target.to(self.device)

    def batch(self, length: int, rows: int) -> NDArray[np.int64]:
        """Half the rows: such a small model gains more from more steps than from larger ones."""
        rows //= 2
        counts = {"samples": rows * SAMPLED_ROWS // 16, "tests": rows * TEST_ROWS // 16}
        if not len(self.sampler.arrays["tests"]):
            counts["tests"] = 0
        counts["library"] = rows - sum(counts.values())
        return self.sampler.batch(counts, length)

    def losses(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mean divergence in nats, and the share of equal first choices."""
        tokens = tokens[:, :-1]
        with torch.no_grad():
            target_logits = self.target(tokens, use_cache=False).logits.float()
        draft_logits = self.model(tokens, use_cache=False).logits.float()
        target_probs = target_logits.softmax(-1)
        cross_entropy = -(target_probs * draft_logits.log_softmax(-1)).sum(-1).mean()
        entropy = -(target_probs * target_logits.log_softmax(-1)).sum(-1).mean()
        agreement = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean()
        return cross_entropy - entropy, agreement


def distill(preset: Preset, runs: Path, *, minutes: float | None, seed: int, threads: int) -> Path:
    """Distil the draft, or continue an interrupted run; return the model's folder.

    Args:
        preset: sizes and lengths.
        runs: folder of the runs, with the finished target.
        minutes: training time; None: the preset's number of tokens.
        seed: seed of samples and batches.
        threads: number of threads.
    """
    set_up(seed, threads)
    _, arrays = prepare(runs)
    target = runs / "target"
    tokenizer = trained_tokenizer(target)
    samples = sample_target(
        target, arrays["library"], SAMPLED_TOKENS, file=runs / "samples.npy", seed=seed
    )
    sampler = Sampler({**arrays, "samples": samples}, seed)
    budget = Budget(preset.draft_tokens, minutes)
    run = Distillation(preset, load_model(target), sampler, budget, runs / "draft.pt")
    run.finish(
        lambda now, smooth: (
            f"divergence {now[0]:.3f} smooth {smooth[0]:.3f} agreement {smooth[1]:.1%}"
        )
    )
    run.write(tokenizer, runs / "draft", threads, sampled_tokens=len(samples))
    return runs / "draft"


def main() -> None:
    """Read the command line and distil."""
    threads = torch.get_num_threads()
    given = options(
        __doc__, preset=device().type, runs=RUNS, minutes=float, seed=21, threads=threads
    )
    plan = {"minutes": given.minutes, "seed": given.seed, "threads": given.threads}
    folder = distill(PRESETS[given.preset], given.runs, **plan)
    print(f"draft written to {folder}")


if __name__ == "__main__":
    main()
