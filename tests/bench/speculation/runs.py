"""Runs as a benchmark would have made them: eleven tokens, ten of them decoded."""

from __future__ import annotations

from typing import Any

from bench.models import BenchModel
from bench.prompts import Prompt
from bench.speculation.ways import PLAIN, Config, Measured, Run
from specops.config import Settings
from specops.request import GenerationStats, SourceStats

MODEL = BenchModel("made-up", "Made-up model", Settings())
SUFFIX = Config("suffix", 4)
ADAPTIVE = Config("suffix", 8, adaptive=True)


def run(tokens: str, seconds: float, steps: int = 10, **counts: Any) -> Run:
    """One run; the prompt's pass takes a second."""
    stats = GenerationStats(
        generated_tokens=11,
        sequence_steps=steps,
        prefill_seconds=1.0,
        decode_seconds=seconds,
        **counts,
    )
    return Run(tuple(map(ord, tokens)), stats)


def measured(ratios: dict[str, list[float]], steps: int = 4) -> Measured:
    """By category how many times faster adaptive speculation was, prompt by prompt."""
    prompts = [Prompt(category, "") for category, found in ratios.items() for _ in found]
    speedups = [ratio for found in ratios.values() for ratio in found]
    adaptive = [
        run("aa", 1 / ratio, steps, drafts=4, sources={"suffix": SourceStats((8,), (0,))})
        for ratio in speedups
    ]
    return Measured(prompts, {PLAIN: [run("aa", 1.0) for _ in speedups], ADAPTIVE: adaptive})
