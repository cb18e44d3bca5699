"""What requests cost each other: batches, pauses while a prompt is computed, the next turn's start.

`python -m bench.scheduling` measures the engine without HTTP on the TinyLlama shape: plain
decoding of 8 requests against one, the pauses of running streams while a prompt of 1,500 tokens is
computed, what that does to the prompt, and the second turn of a chat of 1,000 tokens.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from bench.models import CACHE, TINYLLAMA_VOCAB, tinyllama
from bench.page_cache import evict
from bench.quiet import cpu_seconds, machine_seconds
from bench.report import spread, yes
from bench.stats import Summary, ratios
from specops.engine import Engine
from specops.request import GenerationRequest, StepResult

SLOTS = 8
CONTEXT = 1792
LONG, CHAT, SHORT = 1500, 1000, 200  # tokens of prompts
_SPOKEN = 64  # tokens of the chat's first answer
_ROUNDS = 48  # of decoding, per measurement
_READINGS = 5  # of the long prompt beside as many streams
_STREAMS = (0, 1, 4)  # that the long prompt is computed beside, in turn
_WARM_STEPS = 8
_SLOWED = 1.12  # times its time alone that a prompt may take beside the most streams
_QUANTILE = 0.99  # of the pauses are to be within the bound
_ids = count()


def request(prompt: tuple[int, ...], output: int) -> GenerationRequest:
    """A plain request that does not end by itself."""
    return GenerationRequest(
        request_id=str(next(_ids)), prompt_tokens=prompt, max_new_tokens=output, ignore_eos=True
    )


def prompt(tokens: int, seed: int) -> tuple[int, ...]:
    """Random tokens: prompts of different seeds share no beginning."""
    return tuple(np.random.default_rng(seed).integers(1, TINYLLAMA_VOCAB, tokens).tolist())


@dataclass(frozen=True, slots=True)
class Reading:
    """A long prompt beside running streams: its own time and their pauses, in seconds.

    `passes` are those that computed a part of it, `others` the share of a core that other processes
    had meanwhile.
    """

    seconds: float
    pauses: list[float]
    passes: int
    others: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """Plain decoding: tokens per second, and the share of the time in the model's passes."""

    rate: float
    in_passes: float


class Bench:
    """Runs an engine step by step. Its prefix cache is on; what must be computed is new each time.

    Args:
        engine: with `SLOTS` slots and `CONTEXT` tokens per request.
    """

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self._seeds = count(10)

    def steps(self) -> Iterator[tuple[float, StepResult]]:
        """Steps until nothing is left to do, each with the time of its end."""
        while self._scheduler.busy:
            result = self._scheduler.step()
            yield time.perf_counter(), result

    def fill(self, streams: int, output: int) -> None:
        """Start streams, up to where all of them decode; their prompts are alike."""
        for _ in range(streams):
            self._scheduler.add(request(prompt(SHORT, 1), output))
        first_tokens = 0
        if not streams:
            return
        for _, result in self.steps():
            first_tokens += result.stats.first_tokens if result.stats else 0
            if first_tokens == streams:
                return

    def clear(self) -> None:
        """End everything."""
        self._scheduler.cancel_all()
        for _ in self.steps():
            pass

    def decoding(self, streams: int) -> Decoding:
        """Plain decoding of so many streams, every time with the same tokens behind them."""
        self.fill(streams, _ROUNDS + _WARM_STEPS)
        begun, tokens, passes = time.perf_counter(), 0, 0.0
        for _, result in self.steps():
            if result.stats is not None:
                tokens += result.stats.emitted_tokens
                passes += result.stats.seconds
            if tokens >= _ROUNDS * streams:
                break
        seconds = time.perf_counter() - begun
        self.clear()
        return Decoding(tokens / seconds, passes / seconds)

    def reading(self, running: int) -> Reading:
        """A long prompt, up to its first token, beside running streams."""
        self.fill(running, CONTEXT - SHORT)
        for index, _ in enumerate(self.steps()):
            if index == _WARM_STEPS:
                break
        item = request(prompt(LONG, next(self._seeds)), 1)
        self._scheduler.add(item)
        begun, others = time.perf_counter(), _others_seconds()
        last: dict[str, float] = {}
        pauses: list[float] = []
        passes = 0
        for now, result in self.steps():
            passes += bool(result.stats and result.stats.prompt_tokens)
            said = {output.request_id for output in result.outputs}
            if item.request_id in said:
                break
            pauses += [now - last[name] for name in said & last.keys()]
            last |= dict.fromkeys(said, now)
        seconds = time.perf_counter() - begun
        others = (_others_seconds() - others) / seconds
        self.clear()
        return Reading(seconds, pauses, passes, others)

    def first_token(self, item: GenerationRequest) -> tuple[float, tuple[int, ...]]:
        """Seconds until a request's first token, and all of its tokens."""
        self._scheduler.add(item)
        begun, first = time.perf_counter(), 0.0
        tokens: list[int] = []
        for now, result in self.steps():
            tokens += [piece.token for output in result.outputs for piece in output.pieces]
            if not first and result.stats and result.stats.first_tokens:
                first = now - begun
        return first, tuple(tokens)

    def chat(self) -> tuple[float, float]:
        """Seconds until the first token of the first and of the second turn."""
        text = prompt(CHAT, next(self._seeds))
        first, answer = self.first_token(request(text, _SPOKEN))
        second, _ = self.first_token(request(text + answer + prompt(20, 4), 8))
        return first, second


def _others_seconds() -> float:
    return machine_seconds() - cpu_seconds(os.getpid())


def _read_in_turn(bench: Bench, bound: float) -> None:
    """Compute the long prompt alone and beside streams in turn; ratios are within a turn."""
    readings: dict[int, list[Reading]] = {running: [] for running in _STREAMS}
    for _ in range(_READINGS):
        for running, found in readings.items():
            found.append(bench.reading(running))
            _told(running, found[-1])
    alone = [reading.seconds for reading in readings[0]]
    for running in _STREAMS[1:]:
        found = readings[running]
        times = Summary.of(ratios([reading.seconds for reading in found], alone))
        pauses = [pause for reading in found for pause in reading.pauses]
        most = float(np.quantile(pauses, _QUANTILE))
        wanted = ""
        if running == max(_STREAMS):
            fine = yes(times.median <= _SLOWED), yes(most <= bound)
            wanted = f"; at most {_SLOWED}: {fine[0]}, within {bound:g} s: {fine[1]}"
        print(
            f"beside {running}: {spread(times)} x alone; {_QUANTILE:.0%} of {len(pauses)} pauses "
            f"within {most:.3f} s{wanted}",
            flush=True,
        )


def _told(running: int, found: Reading) -> None:
    pauses = f", the longest pause {max(found.pauses):.3f} s" if found.pauses else ""
    print(
        f"{LONG} tokens beside {running} streams: {found.seconds:.2f} s in {found.passes} passes"
        f"{pauses}; others had {found.others:.0%} of a core",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.scheduling", description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the random model is kept")
    options = parser.parse_args()
    model = tinyllama(print, cache=options.cache)
    bound = model.settings.longest_pause
    evict(model.settings.cache_dir)  # how weights lie in memory moves every figure
    bench = Bench(
        Engine.load(replace(model.settings, slots=SLOTS, context=CONTEXT, prefix_cache="client"))
    )
    one = bench.decoding(1)
    print(f"one plain stream: {one.rate:.1f} tokens/s, {one.in_passes:.1%} of the time in passes")
    for streams in (2, 4, SLOTS):
        many = bench.decoding(streams)
        print(
            f"{streams} streams: {many.rate:.1f} tokens/s, {many.rate / one.rate:.2f} x one, "
            f"{many.in_passes:.1%} of the time in passes",
            flush=True,
        )
    print(f"a prompt of {LONG} tokens; longest pause allowed: {bound:g} s")
    _read_in_turn(bench, bound)
    first, second = bench.chat()
    print(f"chat of {CHAT} tokens: first token after {first:.2f} s, ", end="")
    print(f"second turn after {second:.3f} s ({second / first:.1%})")


if __name__ == "__main__":
    main()
