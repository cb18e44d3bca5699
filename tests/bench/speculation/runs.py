"""Batches as a benchmark would have made them: eleven tokens an answer, ten of them decoded."""

from typing import Any

from bench.engine.together import Answer, Batch
from bench.models import BenchModel
from bench.prompts import Prompt
from bench.speculation.ways import PLAIN, Config, Measured
from specops.config import Settings
from specops.request import FinishReason, GenerationStats, SourceStats, TokenOutput

MODEL = BenchModel("made-up", "Made-up model", Settings())
SUFFIX = Config("suffix", 4)
ADAPTIVE = Config("suffix", 8, adaptive=True)


def run(tokens: str, seconds: float, steps: int = 10, requests: int = 1, **counts: Any) -> Batch:
    """Requests with the same answer; their prompts take a second."""
    pieces = tuple(TokenOutput(ord(letter), letter, "target") for letter in tokens)
    answer = Answer(pieces, FinishReason.LENGTH, GenerationStats(generated_tokens=11, **counts))
    decoded = 10 * requests
    return Batch((answer,) * requests, 1 + seconds, seconds, decoded, steps * requests)


def measured(ratios: dict[str, list[float]], steps: int = 4, at_once: int = 1) -> Measured:
    """By category how many times faster adaptive speculation was, batch by batch."""
    batches = [[Prompt(name, "")] * at_once for name, found in ratios.items() for _ in found]
    drafts = {"drafts": 4, "sources": {"suffix": SourceStats([8], [0])}}
    adaptive = [
        run("aa", 1 / ratio, steps, at_once, **drafts)
        for found in ratios.values()
        for ratio in found
    ]
    return Measured(
        batches, {PLAIN: [run("aa", 1.0, requests=at_once) for _ in batches], ADAPTIVE: adaptive}
    )
