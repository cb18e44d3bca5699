"""What requests cost each other: batches, pauses while a prompt is computed, a chat's next turn.

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
from bench.tools.report import Outcome, Summary, Table, Target, progress, ratios
from specops.engine.engine import Engine
from specops.request import GenerationRequest, Step

SLOTS = 8
CONTEXT = 1792
LONG, CHAT, SHORT = 1500, 1000, 200  # tokens of prompts
_ANSWER = 64  # tokens of the chat's first answer
_ROUNDS = 48  # of decoding, per measurement
_WARM_STEPS = 8
_SLOWED = 1.12  # most of its time alone that a prompt may take beside the most streams
_WITHIN = 0.99  # share of the pauses that should be within the bound


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: plain `streams` at once, the long prompt beside each of `beside`."""

    streams: tuple[int, ...] = (1, 2, 4, SLOTS)
    beside: tuple[int, ...] = (0, 1, 4)
    readings: int = 5  # of the long prompt beside each number of streams


FULL = Plan()
QUICK = Plan(streams=(1, 2), beside=(0, 1), readings=1)


def _prompt(tokens: int, seed: int) -> tuple[int, ...]:
    """Random tokens: prompts of different seeds share no beginning."""
    return tuple(np.random.default_rng(seed).integers(1, TINYLLAMA_VOCAB, tokens).tolist())


@dataclass(frozen=True, slots=True)
class Reading:
    """A long prompt beside running streams: its own time and their pauses, in seconds."""

    seconds: float
    pauses: list[float]
    passes: int  # that computed a part of it
    others: float  # share of a core that other processes took meanwhile


class Decoding(NamedTuple):
    """Plain decoding: tokens per second, and the share of the time in the model's passes."""

    rate: float
    in_passes: float


class Bench:
    """Runs an engine step by step, with its prefix cache; measured prompts are always new."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self._numbers = count(10)

    def _add(self, prompt: tuple[int, ...], output: int) -> str:
        name = str(next(self._numbers))
        request = GenerationRequest(
            request_id=name, prompt_tokens=prompt, max_new_tokens=output, ignore_eos=True
        )
        self._scheduler.add(request)
        return name

    def _steps(self) -> Iterator[tuple[float, Step]]:
        """Run until nothing is left to do; yields the end of each step and its result."""
        while self._scheduler.busy:
            result = self._scheduler.step()
            yield time.perf_counter(), result

    def _fill(self, streams: int, output: int) -> None:
        """Start streams with the same prompt and run until all of them decode."""
        for _ in range(streams):
            self._add(_prompt(SHORT, 1), output)
        first_tokens = 0
        while first_tokens < streams:
            step = self._scheduler.step()
            first_tokens += step.first_tokens

    def _clear(self) -> None:
        self._scheduler.cancel_all()
        for _ in self._steps():
            pass

    def decoding(self, streams: int) -> Decoding:
        """Plain decoding of so many streams, always behind the same tokens."""
        self._fill(streams, _ROUNDS + _WARM_STEPS)
        begun, tokens, passes = time.perf_counter(), 0, 0.0
        for _, result in self._steps():
            if result.kind is not None:
                tokens += result.emitted_tokens
                passes += result.seconds
            if tokens >= _ROUNDS * streams:
                break
        seconds = time.perf_counter() - begun
        self._clear()
        return Decoding(tokens / seconds, passes / seconds)

    def reading(self, running: int) -> Reading:
        """A long prompt, up to its first token, beside running streams."""
        self._fill(running, CONTEXT - SHORT)
        for _ in range(_WARM_STEPS if running else 0):
            self._scheduler.step()
        name = self._add(_prompt(LONG, next(self._numbers)), 1)
        last: dict[str, float] = {}
        pauses: list[float] = []
        passes = 0
        with watched(os.getpid()) as seen:
            for now, result in self._steps():
                passes += bool(result.prompt_tokens)
                heard = {output.request_id for output in result.outputs}
                if name in heard:
                    break
                pauses += [now - last[stream] for stream in heard & last.keys()]
                last |= dict.fromkeys(heard, now)
        self._clear()
        return Reading(seen.seconds, pauses, passes, seen.others)

    def _first_token(self, prompt: tuple[int, ...], output: int) -> tuple[float, tuple[int, ...]]:
        """Seconds until a request's first token, and all of its tokens."""
        self._add(prompt, output)
        begun, first = time.perf_counter(), 0.0
        tokens: list[int] = []
        for now, result in self._steps():
            tokens += [piece.token for output in result.outputs for piece in output.pieces]
            if not first and result.first_tokens:
                first = now - begun
        return first, tuple(tokens)

    def chat(self) -> tuple[float, float]:
        """Seconds until the first token of the first and of the second turn."""
        text = _prompt(CHAT, next(self._numbers))
        first, answer = self._first_token(text, _ANSWER)
        second, _ = self._first_token(text + answer + _prompt(20, 4), 8)
        return first, second


def run(model: BenchModel, plan: Plan) -> Outcome:
    """Measure on an engine whose weights came from the disk."""
    evict(model.settings.cache_dir)  # where weights lie in memory changes every figure
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
    """The tables, and the targets beside the most streams. Ratios are taken within a turn."""
    alone = [reading.seconds for reading in readings[0]]
    rows, targets = [], []
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
            targets.append(
                Target(f"{what}: speed of the prompt alone", 1 / _SLOWED, 1 / times.median)
            )
            targets.append(Target(f"{what}: pauses within {bound:g} s", _WITHIN, share))
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
                f"latency of the streams meanwhile; the longest allowed: {bound:g} s",
                f"chat of {CHAT} tokens: first token after {first:.2f} s, the second turn's after "
                f"{second:.3f} s",
            ),
        ),
    ]  # fmt: skip
    result = {"decoding": {n: item._asdict() for n, item in decoding.items()}, "bound": bound}
    result |= {"readings": {n: list(map(asdict, found)) for n, found in readings.items()}}
    return Outcome(result | {"chat": chat}, tables, targets=targets)
