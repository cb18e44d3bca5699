"""Several requests at once on one engine: how fast they decode, and how fast the whole batch was.

A pass may hold chunks of prompts beside requests that decode, so the time of prompts cannot be
taken out pass by pass. What counts as decoding is therefore what happens after the last prompt of
the batch was computed: tokens from then on over the time from then on. Every way of decoding is
measured like that, plain decoding too. The whole batch, prompts included, is told beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.prompts import Prompt
from bench.speculation.ways import Config, Runner

HOW = (
    "tok/s and speedup: tokens of all requests after the pass that computed the last prompt, over "
    "the time from there to the end, plain decoding likewise; whole: time of the whole batch, "
    "prompts included, of plain decoding over this one's"
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that were sent at once."""

    seconds: float  # from the sending to the last token
    decode_seconds: float  # of them, those after the last prompt was computed
    tokens: int  # decoded in that time, all requests together
    steps: int  # sequence steps in that time, one per request and pass

    @property
    def rate(self) -> float:
        """Decoded tokens per second, all requests together."""
        return self.tokens / self.decode_seconds


def in_batches(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    """Prompts in batches of `size`; a smaller rest is left out."""
    ends = range(size, len(prompts) + 1, size)
    return [prompts[end - size : end] for end in ends]


def run_batch(runner: Runner, config: Config, prompts: Sequence[Prompt], new_tokens: int) -> Batch:
    """Send all prompts at once and run them to their end."""
    runner.choose(config)
    scheduler = runner.engine.scheduler
    for number, prompt in enumerate(prompts):
        request = runner.engine.admit(runner.request(prompt, config, new_tokens))
        scheduler.add(replace(request, request_id=f"bench-{number}"))
    waiting, tokens, steps = len(prompts), 0, 0
    start = computed = time.perf_counter()
    while scheduler.busy:
        stats = scheduler.step().stats
        if stats is None:
            continue
        if waiting > 0:
            waiting -= stats.first_tokens
            computed = time.perf_counter()
        else:
            tokens += stats.emitted_tokens
            steps += stats.decoding
    end = time.perf_counter()
    if waiting > 0 or not tokens:
        raise RuntimeError("the batch ended with its last prompt: more new tokens are needed")
    return Batch(end - start, end - computed, tokens, steps)
