"""What the layers cost: the bare ONNX Runtime loop, the engine around it, the API around that.

All sides run the same graph, the same prompt and the same number of tokens, one stream, greedy,
in turns within one run, only one of them active at a time. Every `load` starts all sides afresh:
how the weights happened to fall into memory pages decides up to a quarter of the speed, and must
not favour one side throughout.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.bare import BareLoop
from bench.models import BenchModel, Progress
from bench.quiet import cpu_seconds, settle
from bench.report import Table, spread, yes
from bench.server import Client, serving
from bench.stats import Summary, ratios, rotated
from specops.engine import NO_DRAFTER, Engine
from specops.request import GenerationRequest, Output, StepKind

BARE, ENGINE, API, STREAM = "bare loop", "engine", "API", "API, streaming"
# Who is held against whom, and the share of its speed that is wanted on a large model.
_COMPARED = {ENGINE: (BARE, 0.97), API: (ENGINE, 0.95), STREAM: (ENGINE, None)}
_STEP_AIM_MS = 0.3
_PROMPT = '''\
def parse_header(line: str) -> tuple[str, str]:
    """Split a header line into its name and its value."""
    name, separator, value = line.partition(":")
    if not separator:
        raise ValueError(f"no colon in {line!r}")
    return name.strip().lower(), value.strip()


def format_header(name: str, value: str) -> str:
'''


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of every side after each of `loads` starts."""

    loads: int
    rounds: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One request of one side. Seconds: the whole of it, and from the first token to the last."""

    whole: float
    decode: float
    text: str | None  # None where the side makes no text
    tokens: tuple[int, ...] | None  # None where the side shows no tokens


@dataclass(slots=True)
class Measured:
    """All of one model's rounds, in the order in which they ran."""

    model: BenchModel
    new_tokens: int
    prompt_tokens: int = 0
    decode_rates: dict[str, list[float]] = field(default_factory=dict)  # tokens per second
    whole_rates: dict[str, list[float]] = field(default_factory=dict)
    step_ms: list[float] = field(default_factory=list)  # engine - bare loop, per step, per round
    outside_target_ms: list[float] = field(default_factory=list)  # per step, one per load
    idle_share: float = 0.0  # most CPU that an idle side took, as a share of one core
    outputs_equal: bool = True

    def take(self, timings: Mapping[str, Timing]) -> None:
        """Add a round: one timing of every side."""
        steps = self.new_tokens - 1
        for side, timing in timings.items():
            self.decode_rates.setdefault(side, []).append(steps / timing.decode)
            self.whole_rates.setdefault(side, []).append(self.new_tokens / timing.whole)
        self.step_ms.append(1000 * (timings[ENGINE].decode - timings[BARE].decode) / steps)
        texts = {timing.text for timing in timings.values() if timing.text is not None}
        tokens = {timing.tokens for timing in timings.values() if timing.tokens is not None}
        self.outputs_equal &= len(texts) <= 1 and len(tokens) <= 1


def measure(model: BenchModel, plan: Plan, progress: Progress) -> Measured:
    """Time every side on one model."""
    measured = Measured(model, plan.new_tokens)
    for load in range(plan.loads):
        progress(f"{model.title}: starting all sides, {load + 1} of {plan.loads}")
        _measure_load(measured, plan, progress)
        gc.collect()  # ONNX Runtime's pool of threads ends with the last session, see _measure_load
    return measured


def _measure_load(measured: Measured, plan: Plan, progress: Progress) -> None:
    """Start every side, time it, stop it. Sessions must not outlive this: the next engine could
    not set up the process's thread pool.
    """
    new_tokens, model = plan.new_tokens, measured.model
    engine = Engine.load(model.settings)
    prompt = engine.encode(_PROMPT)
    measured.prompt_tokens = len(prompt)
    bare = BareLoop(
        model.graph().session,
        prompt_tokens=len(prompt),
        new_tokens=new_tokens,
        kv_dtype=engine.info.kv_dtype,
    )
    with _server(model) as server:
        sides = _sides(bare, engine, server, new_tokens)
        _round(sides, 0, server, measured)  # allocates, binds, faults pages in: not counted
        for number in range(plan.rounds):
            measured.take(_round(sides, number, server, measured))
            progress(f"{model.title}: round {number + 1} of {plan.rounds}")
    settle()
    measured.outside_target_ms.append(_outside_target_ms(engine, new_tokens))


@dataclass(frozen=True, slots=True)
class _Server:
    pid: int
    client: Client


@contextmanager
def _server(model: BenchModel) -> Iterator[_Server]:
    with serving(model.settings) as (pid, client):
        yield _Server(pid, client)


def _sides(
    bare: BareLoop, engine: Engine, server: _Server, new_tokens: int
) -> dict[str, Callable[[], Timing]]:
    body = {
        "prompt": _PROMPT,
        "max_new_tokens": new_tokens,
        "drafter": NO_DRAFTER,
        "ignore_eos": True,
        "details": True,
    }
    return {
        BARE: lambda: _run_bare(bare, engine.encode(_PROMPT)),
        ENGINE: lambda: _run_engine(engine, new_tokens),
        API: lambda: _run_api(server.client.generate, body),
        STREAM: lambda: _run_api(server.client.stream, body),
    }


def _round(
    sides: Mapping[str, Callable[[], Timing]], number: int, server: _Server, measured: Measured
) -> dict[str, Timing]:
    """Run every side once, whoever is not running seen to be idle."""
    timings = {}
    for side in rotated(list(sides), number):
        idle = None if side in (API, STREAM) else server.pid
        if not idle:
            server.client.reconnect()
        settle(server.pid)
        before = cpu_seconds(idle) if idle else 0.0
        timings[side] = timing = sides[side]()
        if idle:
            share = (cpu_seconds(idle) - before) / timing.whole
            measured.idle_share = max(measured.idle_share, share)
    return timings


def _run_bare(bare: BareLoop, prompt: tuple[int, ...]) -> Timing:
    run = bare.run(prompt)
    whole = run.prefill_seconds + run.decode_seconds
    return Timing(whole, run.decode_seconds, None, tuple(run.tokens))


def _request(engine: Engine, new_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id="bench",
        prompt_tokens=engine.encode(_PROMPT),
        max_new_tokens=new_tokens,
        drafter=NO_DRAFTER,
        ignore_eos=True,
    )


def _run_engine(engine: Engine, new_tokens: int) -> Timing:
    """From the prompt's text to the answer's text, like the API."""
    start = time.perf_counter()
    outputs = list(engine.generate(_request(engine, new_tokens)))
    text = "".join(output.text for output in outputs)
    whole = time.perf_counter() - start
    tokens = tuple(piece.token for output in outputs for piece in output.pieces)
    return Timing(whole, _finished(outputs[-1], new_tokens), text, tokens)


def _finished(last: Output, new_tokens: int) -> float:
    """Seconds from the first to the last token of a request that ran to its end."""
    if last.stats is None or last.stats.generated_tokens != new_tokens:
        raise RuntimeError(f"the engine did not generate {new_tokens} tokens: {last}")
    return last.stats.decode_seconds


def _run_api(ask: Callable[[Mapping[str, Any]], dict[str, Any]], body: Mapping[str, Any]) -> Timing:
    """The whole as the client sees it, decoding by the server's clock."""
    start = time.perf_counter()
    answer = ask(body)
    whole = time.perf_counter() - start
    if answer["generated_tokens"] != body["max_new_tokens"]:
        raise RuntimeError(f"the API did not generate {body['max_new_tokens']} tokens: {answer}")
    return Timing(whole, answer["details"]["decode_seconds"], answer["generated_text"], None)


def _outside_target_ms(engine: Engine, new_tokens: int) -> float:
    """Milliseconds that a decode step takes beside the target's pass, seen from inside."""
    scheduler = engine.scheduler
    scheduler.add(_request(engine, new_tokens))
    outside, steps = 0.0, 0
    while scheduler.busy:
        start = time.perf_counter()
        stats = scheduler.step().stats
        seconds = time.perf_counter() - start
        if stats is not None and stats.kind is StepKind.DECODE:
            outside += seconds - stats.seconds
            steps += 1
    return 1000 * outside / steps


def table(measured: Measured) -> Table:
    """A row per side, with its speed against the side below it."""
    rows = []
    for side, rates in measured.decode_rates.items():
        whole = measured.whole_rates[side]
        speeds = (f"{Summary.of(rates).median:.1f}", f"{Summary.of(whole).median:.1f}")
        if side not in _COMPARED:
            rows.append((side, *speeds, "", "", "", ""))
            continue
        base, wanted = _COMPARED[side]
        rows.append(
            (
                side,
                *speeds,
                base,
                spread(Summary.of(ratios(rates, measured.decode_rates[base])), 3),
                spread(Summary.of(ratios(whole, measured.whole_rates[base])), 3),
                f"{wanted:.2f}" if wanted and measured.model.large else "",
            )
        )
    columns = ("side", "decode tok/s", "request tok/s", "against", "decode", "request", "wanted")
    return Table(f"Overhead: {measured.model.title}", columns, rows, _notes(measured))


def _notes(measured: Measured) -> tuple[str, ...]:
    step, outside = Summary.of(measured.step_ms), Summary.of(measured.outside_target_ms)
    rounds = len(measured.step_ms)
    return (
        f"engine overhead per step: {spread(step, 3)} ms against the bare loop, "
        f"{outside.median:.3f} ms outside of the target's pass (aim: under {_STEP_AIM_MS} ms)",
        f"{measured.prompt_tokens} prompt tokens and {measured.new_tokens} new ones, one stream, "
        f"greedy, {rounds} interleaved rounds; medians, ratios round by round with quartiles",
        f"same output on all sides: {yes(measured.outputs_equal)}; the idle API process took at "
        f"most {measured.idle_share:.1%} of a core",
    )


def result(measured: Measured) -> dict[str, Any]:
    """All of it, fit for JSON."""
    compared = {}
    for side, (base, wanted) in _COMPARED.items():
        decode = ratios(measured.decode_rates[side], measured.decode_rates[base])
        whole = ratios(measured.whole_rates[side], measured.whole_rates[base])
        compared[side] = {
            "against": base,
            "wanted": wanted if measured.model.large else None,
            "decode": asdict(Summary.of(decode)),
            "request": asdict(Summary.of(whole)),
        }
    return {
        "model": measured.model.key,
        "prompt_tokens": measured.prompt_tokens,
        "new_tokens": measured.new_tokens,
        "ratios": compared,
        "step_overhead_ms": asdict(Summary.of(measured.step_ms)),
        "outside_target_ms": asdict(Summary.of(measured.outside_target_ms)),
        "outputs_equal": measured.outputs_equal,
        "idle_share": measured.idle_share,
        "decode_tokens_per_second": measured.decode_rates,
        "request_tokens_per_second": measured.whole_rates,
    }
