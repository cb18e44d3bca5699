"""Trains the target on next-token prediction, with a progress line per step; it can be resumed.

`python -m training.pretrain --minutes 80` plans the learning rate for 80 minutes of training time
and then ends. Without `--minutes` it trains on the preset's number of tokens.
"""

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from training.checkpoint import new_model, set_up
from training.corpus import load_corpus
from training.data import Sampler, rows_of_tests, token_arrays
from training.files import RUNS, options
from training.loop import Training
from training.presets import PRESETS, Preset
from training.runtime import Budget, device
from training.tokenizer import train_tokenizer

VECTOR_LR = 0.003


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
    """Mean bytes of a token, which turn a loss into bits per byte for the progress line."""
    sample = tokens[: 1 << 18].tolist()
    return len(tokenizer.decode(sample).encode("utf-8")) / len(sample)


class Target(Training):
    """Trains the target."""

    def __init__(self, preset: Preset, sampler: Sampler, budget: Budget, file: Path) -> None:
        target = new_model(preset.target)
        super().__init__(preset, target, sampler, budget, file, vector_lr=VECTOR_LR)

    def batch(self, length: int, rows: int) -> NDArray[np.int64]:
        """A batch with a falling share of tests; see `rows_of_tests`."""
        has_tests = len(self.sampler.arrays["tests"])
        tests = rows_of_tests(self.budget.progress, rows) if has_tests else 0
        return self.sampler.batch({"tests": tests, "library": rows - tests}, length)

    def losses(self, tokens: Tensor) -> tuple[Tensor]:
        """Cross-entropy of the next token."""
        logits = self.model(tokens[:, :-1], use_cache=False).logits.float()
        return (F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()),)


def train(preset: Preset, runs: Path, *, minutes: float | None, seed: int, threads: int) -> Path:
    """Train the target, or continue an interrupted run; return the model's folder.

    Args:
        preset: sizes and lengths.
        runs: folder of the runs.
        minutes: training time; None: the preset's number of tokens.
        seed: seed of weights and batches.
        threads: number of threads.
    """
    set_up(seed, threads)
    tokenizer, arrays = prepare(runs)
    per_byte = 1 / math.log(2) / bytes_per_token(tokenizer, arrays["library"])  # bits per nat
    budget = Budget(preset.target_tokens, minutes)
    target = Target(preset, Sampler(arrays, seed), budget, runs / "target.pt")
    target.finish(
        lambda now, smooth: (
            f"loss {now[0]:.3f} smooth {smooth[0]:.3f} bits/byte ~{smooth[0] * per_byte:.3f}"
        )
    )
    sizes = {f"{name}_tokens": len(array) for name, array in arrays.items()}
    target.write(tokenizer, runs / "target", threads, **sizes)
    return runs / "target"


def main() -> None:
    """Read the command line and train."""
    threads = torch.get_num_threads()
    given = options(
        __doc__, preset=device().type, runs=RUNS, minutes=float, seed=20, threads=threads
    )
    plan = {"minutes": given.minutes, "seed": given.seed, "threads": given.threads}
    folder = train(PRESETS[given.preset], given.runs, **plan)
    print(f"target written to {folder}")


if __name__ == "__main__":
    main()
