"""Samples the target's continuations of library text, which the draft has to predict."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from training.data import Tokens
from training.runtime import device

PROMPT, CONTINUATION = 64, 192  # tokens
_BATCH = 256  # a step with 64 takes nearly as long


def sample_target(folder: Path, library: Tokens, tokens: int, *, file: Path, seed: int) -> Tokens:
    """Sample continuations of 192 tokens for prompts of 64 library tokens.

    Every other batch is greedy; the rest is sampled at temperature 0.8. The result is saved batch
    by batch, so that an interrupted run can continue.

    Args:
        folder: the target's folder.
        library: tokens of the library text.
        tokens: approximate number of tokens, prompts included.
        file: file for the result.
        seed: seed of prompts and samples.
    """
    rows = [] if not file.exists() else [np.load(file).reshape(-1, PROMPT + CONTINUATION)]
    model = None
    while sum(len(row) for row in rows) * (PROMPT + CONTINUATION) < tokens:
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)  # nosec B615
            model = model.to(device()).eval()
        number = sum(len(row) for row in rows) // _BATCH
        rng = np.random.default_rng([seed, number])
        starts = rng.integers(0, len(library) - PROMPT, _BATCH)
        prompts = np.stack([library[start : start + PROMPT] for start in starts]).astype(np.int64)
        torch.manual_seed(seed + number)
        with torch.inference_mode():
            output = model.generate(
                torch.from_numpy(prompts).to(model.device),
                attention_mask=torch.ones(prompts.shape, dtype=torch.long, device=model.device),
                max_new_tokens=CONTINUATION,
                min_new_tokens=CONTINUATION,
                do_sample=bool(number % 2),
                **({"temperature": 0.8, "top_k": 0} if number % 2 else {}),
            )
        rows.append(output.cpu().numpy().astype(np.uint16))
        np.save(file, np.concatenate(rows).reshape(-1))
        print(f"sampled {sum(len(row) for row in rows):,} continuations", flush=True)
    return np.load(file)
