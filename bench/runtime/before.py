"""This checkout against another one, such as the commit before a change: same passes, in turns.

Each side is a process with its own checkout's interpreter, so old and new code share nothing but
`before_worker`, which asks the engine and its scheduler alone. Both are up at once and take turns,
case by case: one computes while the other is seen to be idle. Ratios are taken round by round.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.memory.page_cache import evict
from bench.models import BenchModel, Progress
from bench.tools.quiet import Turns
from bench.tools.report import Outcome, Table, Wanted, spread
from bench.tools.stats import Summary, ratios
from bench.tools.worker import Worker
from specops.config import ConfigError

OURS, OTHER = "this checkout", "the other"
_SLOTS, _CONTEXT = 8, 1024
_STREAMS = 4  # beside which prompts arrive
_WORKER = Path(__file__).with_name("before_worker.py")
_MIXED = "prompts beside 4 streams"


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step, or a prompt; `most` of the other's time is wanted of ours."""

    title: str
    streams: int = 0
    draft_tokens: int = 0  # of each
    prompt: int = 0  # tokens
    most: float | None = None

    def ask(self, worker: Worker, steps: int) -> list[float]:
        """Seconds of each step, or of the prompt."""
        if self.prompt:
            answer = worker.ask("prompt", tokens=self.prompt)
        else:
            asked = {"streams": self.streams, "draft_tokens": self.draft_tokens}
            answer = worker.ask("steps", steps=steps, **asked)
        return [float(value) for value in answer["seconds"]]


CASES = (
    Case("1 token", 1, most=1.0),
    Case("4 requests of one token", 4),
    Case("8 requests of one token", 8, most=0.95),
    Case("1 request of 4 tokens", 1, 3),
    Case("4 requests of 4 tokens", 4, 3),
    Case("prompt of 512", prompt=512, most=0.97),
)
_MIXED_LEAST = 1.1  # times the other's tokens per second


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of every case after each of `loads` starts."""

    loads: int
    rounds: int
    steps: int  # of a side in a round; its time is their median
    mixed_rounds: int
    mixed_seconds: float
    cases: tuple[Case, ...] = CASES


FULL = Plan(loads=2, rounds=8, steps=12, mixed_rounds=3, mixed_seconds=10.0)
QUICK = Plan(loads=1, rounds=1, steps=2, mixed_rounds=1, mixed_seconds=0.5)


@dataclass(slots=True)
class Measured:
    """All rounds of a model, in order: milliseconds by case and side, tokens per second of mixed.

    `mixed` has by side a pair for each round: of the streams, of the prompts.
    """

    title: str
    ms: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    mixed: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def mixed_speedup(self) -> Summary:
        """Our tokens per second over the other's, streams' and prompts' together."""
        ours, other = ([sum(pair) for pair in self.mixed[side]] for side in (OURS, OTHER))
        return Summary.of(ratios(ours, other))


def run(models: Sequence[BenchModel], other: Path, plan: Plan, progress: Progress) -> Outcome:
    """Measure both checkouts with every model."""
    interpreter = other / ".venv" / "bin" / "python"
    if not interpreter.is_file():
        raise ConfigError(f"{other} has no .venv/bin/python: run `make test` there once")
    commands = {OURS: sys.executable, OTHER: str(interpreter.absolute())}
    found, turns = [], Turns()
    for model in models:
        measured = Measured(model.title)
        for load in range(plan.loads):
            progress(f"{model.title}: starting both sides, {load + 1} of {plan.loads}")
            with _started(model, commands) as workers:
                _measure(workers, plan, measured, turns)
        found.append(measured)
    return outcome(found, other, plan, turns)


def _measure(workers: Mapping[str, Worker], plan: Plan, measured: Measured, turns: Turns) -> None:
    def mixed(worker: Worker) -> tuple[float, float]:
        rates = worker.ask("mixed", streams=_STREAMS, seconds=plan.mixed_seconds)
        return float(rates["streams"]), float(rates["prompts"])

    for number in range(-1, plan.rounds):  # the first faults pages in and is not counted
        for case in plan.cases:
            found = turns.round(workers, number, partial(case.ask, steps=plan.steps))
            for side, seconds in found.items() if number >= 0 else ():
                times = measured.ms.setdefault(case.title, {}).setdefault(side, [])
                times.append(1000 * Summary.of(seconds).median)
    for number in range(plan.mixed_rounds):
        for side, pair in turns.round(workers, number, mixed).items():
            measured.mixed.setdefault(side, []).append(pair)


@contextlib.contextmanager
def _started(model: BenchModel, commands: Mapping[str, str]) -> Iterator[dict[str, Worker]]:
    settings = model.settings
    told = {
        name: getattr(settings, name)
        for name in ("model", "target", "draft", "quant", "draft_quant", "threads", "prefix_cache")
    }
    with contextlib.ExitStack() as stack:
        workers = {}
        for number, (side, python) in enumerate(commands.items()):
            cache = settings.cache_dir / f"before-{number}"  # tiles and costs of either
            if cache.is_dir():
                evict(cache)  # how weights lie in memory must not favour one side
            worker = stack.enter_context(Worker(side, (python, "-P", str(_WORKER))))
            sizes = {"slots": _SLOTS, "context": _CONTEXT}
            worker.ask("load", settings={**told, **sizes, "cache_dir": str(cache)})
            workers[side] = worker
        yield workers


def outcome(found: Sequence[Measured], other: Path, plan: Plan, turns: Turns) -> Outcome:
    """The tables of all models."""
    tables, wanted = [], []
    for measured in found:
        rows = []
        for case in plan.cases:
            times = measured.ms[case.title]
            speedup = Summary.of(ratios(times[OTHER], times[OURS]))
            share = Summary.of(ratios(times[OURS], times[OTHER]))
            both = (spread(Summary.of(times[side])) for side in (OTHER, OURS))
            most = f"{case.most:.2f}" if case.most else ""
            rows.append((case.title, *both, spread(share), spread(speedup), most))
            if case.most:
                what = f"{measured.title}, {case.title}: times as fast"
                wanted.append(Wanted(what, 1 / case.most, speedup.median))
        mixed = measured.mixed_speedup()
        wanted.append(Wanted(f"{measured.title}, {_MIXED}: tok/s", _MIXED_LEAST, mixed.median))
        columns = ("step", f"{OTHER}, ms", f"{OURS}, ms", "share", "times as fast", "at most")
        notes = (
            f"{plan.loads} starts, {plan.rounds} rounds, {plan.steps} steps each: whole steps of "
            "the scheduler behind prompts of 200 tokens; a prompt from its arrival to its first "
            "token; medians with quartiles, ratios round by round",
            turns.told,
            "tokens of a request beyond the first are draft tokens that it verifies and rejects",
        )
        title = f"Steps against another checkout: {measured.title}"
        tables += [Table(title, columns, rows, notes), _mixed_table(measured, mixed, plan)]
    result: dict[str, Any] = {"other": other.name, "plan": asdict(plan)}
    result["models"] = [asdict(measured) for measured in found]
    return Outcome(result, tables, wanted=wanted)


def _mixed_table(measured: Measured, speedup: Summary, plan: Plan) -> Table:
    rows = []
    for side in (OTHER, OURS):
        streams, prompts = zip(*measured.mixed[side], strict=True)
        both = [sum(pair) for pair in measured.mixed[side]]
        rows.append((side, *(spread(Summary.of(rates), 1) for rates in (streams, prompts, both))))
    return Table(
        f"Prompts beside {_STREAMS} streams, against another checkout: {measured.title}",
        ("side", "streams, tok/s", "prompts, tok/s", "both, tok/s"),
        rows,
        (
            f"a prompt of 256 tokens arrives as soon as the last one is done, beside {_STREAMS} "
            f"plain streams, for {plan.mixed_seconds:g} s; {len(measured.mixed[OURS])} rounds in "
            f"turns; ours over the other's, both together: {spread(speedup)}",
        ),
    )
