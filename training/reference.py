"""Checks the shipped target against transformers, and against the weights before rounding.

Writes `reference.json` for the model card: bits per byte of a few held-out modules by the float32
weights of the training's checkpoint and by transformers on the shipped float16 folder.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from training.checkpoint import load_model, trained_tokenizer
from training.corpus import DEMO_DIR, Document, read_held_out
from training.evaluate import Forward, bits_per_byte
from training.files import REFERENCE, RUNS, options
from training.runtime import load_checkpoint

MODULES = ("bisect.py", "queue.py", "shlex.py", "textwrap.py")


def sample(folder: Path) -> list[Document]:
    """The held-out modules that are compared."""
    return [document for document in read_held_out(folder) if document.path in MODULES]


def transformers_forward(folder: Path) -> Forward:
    """The forward pass of transformers' own implementation, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # nosec B615

    def forward(tokens: Sequence[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            return model(torch.tensor([list(tokens)])).logits[0].numpy()

    return forward


def unrounded_forward(folder: Path, checkpoint: Path) -> Forward:
    """The forward pass of the training's own model, with the float32 weights of `checkpoint`."""
    model = load_model(folder)
    state = load_checkpoint(checkpoint)
    if state is None:
        raise FileNotFoundError(checkpoint)
    model.load_state_dict(state["model"])

    def forward(tokens: Sequence[int]) -> NDArray[np.float32]:
        return model(torch.tensor([list(tokens)]))[0].numpy()

    return forward


def main() -> None:
    """Read the command line, compare, write reference.json."""
    given = options(__doc__, folder=DEMO_DIR, runs=RUNS)
    target, documents = given.folder / "target", sample(given.folder)
    tokenizer = trained_tokenizer(target)
    forwards = {
        "checkpoint_float32": unrounded_forward(target, given.runs / "target.pt"),
        "transformers_float16_weights": transformers_forward(target),
    }
    figures = {
        name: bits_per_byte(forward, tokenizer, documents)["all"]
        for name, forward in forwards.items()
    }
    print(figures)
    content = json.dumps({"modules": MODULES, **figures}, indent=1) + "\n"
    (given.folder / REFERENCE).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
