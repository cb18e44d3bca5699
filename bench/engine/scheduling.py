"""What requests cost each other: batches, pauses while a prompt is computed, the next turn's start.

The engine without HTTP on TinyLlama's shape: plain decoding of 8 requests against one, a prompt of
1,500 tokens alone and beside running streams in turn, the streams' inter-token latency meanwhile,
and the second turn of a chat of 1,000 tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import NamedTuple

import numpy as np

from bench.memory.page_cache import evict
from bench.models import TINYLLAMA_VOCAB, BenchModel
from bench.tools.quiet import watched
from bench.tools.report import Outcome, Summary, Table, Wanted, progress, ratios
from specops.engine.engine import Engine
from specops.request import GenerationRequest, StepResult

SLOTS = 8
CONTEXT = 1792
LONG, CHAT, SHORT = 1500, 1000, 200  # tokens of prompts
_SPOKEN = 64  # tokens of the chat's first answer
_ROUNDS = 48  # of decoding, per measurement
_WARM_STEPS = 8
_SLOWED = 1.12  # times its time alone that a prompt may take beside the most streams
_WITHIN = 0.99  # of the pauses are to be within the bound
_ids = count()


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: plain `streams` at once, the long prompt beside each of `beside`."""

    streams: tuple[int, ...] = (1, 2, 4, SLOTS)
    beside: tuple[int, ...] = (0, 1, 4)
    readings: int = 5  # of the long prompt beside as many streams


FULL = Plan()
QUICK = Plan(streams=(1, 2), beside=(0, 1), readings=1)


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
    """A long prompt beside running streams: its own time and their pauses, in seconds."""

    seconds: float
    pauses: list[float]
    passes: int  # that computed a part of it
    others: float  # share of a core that other processes had meanwhile


class Decoding(NamedTuple):
    """Plain decoding: tokens per second, and the share of the time in the model's passes."""

    rate: float
    in_passes: float


class Bench:
    """Runs an engine step by step, its prefix cache on; what must be computed is always new."""

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
        last: dict[str, float] = {}
        pauses: list[float] = []
        passes = 0
        with watched(os.getpid()) as seen:
            for now, result in self.steps():
                passes += bool(result.stats and result.stats.prompt_tokens)
                said = {output.request_id for output in result.outputs}
                if item.request_id in said:
                    break
                pauses += [now - last[name] for name in said & last.keys()]
                last |= dict.fromkeys(said, now)
        self.clear()
        return Reading(seen.seconds, pauses, passes, seen.others)

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


def run(model: BenchModel, plan: Plan) -> Outcome:
    """Measure on an engine whose weights came from the disk."""
    evict(model.settings.cache_dir)  # how weights lie in memory moves every figure
    settings = replace(model.settings, slots=SLOTS, context=CONTEXT, prefix_cache="client")
    bench = Bench(Engine.load(settings))
    decoding = {streams: bench.decoding(streams) for streams in plan.streams}
    readings: dict[int, list[Reading]] = {running: [] for running in plan.beside}
    for number in range(plan.readings):
        for running, found in readings.items():
            found.append(bench.reading(running))
        progress(f"long prompt: {number + 1} of {plan.readings}")
    bound = settings.max_inter_token_latency
    return outcome(model.title, decoding, readings, chat=bench.chat(), bound=bound)


def outcome(
    title: str,
    decoding: Mapping[int, Decoding],
    readings: Mapping[int, Sequence[Reading]],
    *,
    chat: tuple[float, float],
    bound: float,
) -> Outcome:
    """The tables, and what is wanted beside the most streams; ratios are within a turn."""
    alone = [reading.seconds for reading in readings[0]]
    rows, wanted = [], []
    for running, found in readings.items():
        seconds = [reading.seconds for reading in found]
        times = Summary.of(ratios(seconds, alone))
        pauses = [pause for reading in found for pause in reading.pauses]
        within = float(np.quantile(pauses, _WITHIN)) if pauses else 0.0
        others = max(reading.others for reading in found)
        rows.append(
            (
                str(running), Summary.of(seconds).spread(), times.spread() if running else "",
                f"{within:.3f}" if pauses else "", f"{max(pauses):.3f}" if pauses else "",
                str(found[-1].passes), f"{others:.0%}",
            )
        )  # fmt: skip
        if running == max(readings):
            share = sum(pause <= bound for pause in pauses) / len(pauses)
            what = f"beside {running} streams"
            wanted.append(
                Wanted(f"{what}: speed of the prompt alone", 1 / _SLOWED, 1 / times.median)
            )
            wanted.append(Wanted(f"{what}: pauses within {bound:g} s", _WITHIN, share))
    one = decoding[1].rate
    first, second = chat
    tables = [
        Table(
            f"Plain streams at once: {title}",
            ("streams", "tok/s", "of one", "time in passes"),
            [
                (str(n), f"{item.rate:.1f}", f"{item.rate / one:.2f}", f"{item.in_passes:.1%}")
                for n, item in decoding.items()
            ],
        ),
        Table(
            f"A prompt of {LONG} tokens beside streams: {title}",
            ("streams", "prompt, s", "of alone", f"{_WITHIN:.0%} of pauses within, s",
             "longest pause, s", "passes", "others' share of a core"),
            rows,
            (
                f"in turn, {len(alone)} times each, medians with quartiles; pauses: inter-token "
                f"latency of the streams meanwhile; longest one wanted: {bound:g} s",
                f"chat of {CHAT} tokens: first token after {first:.2f} s, the second turn's after "
                f"{second:.3f} s",
            ),
        ),
    ]  # fmt: skip
    result = {"decoding": {n: item._asdict() for n, item in decoding.items()}, "bound": bound}
    result |= {"readings": {n: list(map(asdict, found)) for n, found in readings.items()}}
    return Outcome(result | {"chat": chat}, tables, wanted=wanted)
