"""This checkout against another one, such as the commit before a change: same passes, in turns.

Each side is a process with its own checkout's interpreter, so old and new code share nothing but
`before_worker`, which asks the engine and its scheduler alone. Both are up at once and take turns,
case by case: one computes while the other is seen to be idle. Ratios are taken round by round.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.memory.page_cache import evict
from bench.models import BenchModel, Progress
from bench.tools.quiet import Times, Turns
from bench.tools.report import Outcome, Table, Wanted, spread
from bench.tools.stats import Summary, ratios
from bench.tools.worker import Worker
from specops.config import ConfigError

OURS, OTHER = "this checkout", "the other"
_SLOTS, _CONTEXT = 8, 1024


@dataclass(frozen=True, slots=True)
class Case:
    """Steps, a prompt, or prompts beside streams; `most` of the other's time is wanted of ours."""

    title: str
    streams: int = 0
    draft_tokens: int = 0  # of each
    prompt: int = 0  # tokens
    most: float | None = None

    @property
    def seldom(self) -> bool:
        """Whether it takes as long as all others together."""
        return bool(self.streams and self.prompt)

    def ask(self, worker: Worker, plan: Plan) -> list[float]:
        """Seconds of each step, of the prompt, or by token of both."""
        if self.seldom:
            asked: dict[str, Any] = {"do": "mixed", "seconds": plan.mixed_seconds}
            asked |= {"streams": self.streams, "tokens": self.prompt}
        elif self.prompt:
            asked = {"do": "prompt", "tokens": self.prompt}
        else:
            asked = {"do": "steps", "steps": plan.steps, "streams": self.streams}
            asked |= {"draft_tokens": self.draft_tokens}
        return [float(value) for value in worker.ask(**asked)["seconds"]]


CASES = (
    Case("1 token", 1, most=1.0),
    Case("4 requests of one token", 4),
    Case("8 requests of one token", 8, most=0.95),
    Case("1 request of 4 tokens", 1, 3),
    Case("4 requests of 4 tokens", 4, 3),
    Case("prompt of 512", prompt=512, most=0.97),
    Case("a token of prompts beside 4 streams, or of those", 4, prompt=256, most=1 / 1.1),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of every case after each of `loads` starts."""

    loads: int
    rounds: int
    steps: int  # of a side in a round; its time is their median
    mixed_seconds: float
    cases: tuple[Case, ...] = CASES


FULL = Plan(loads=2, rounds=9, steps=12, mixed_seconds=10.0)
QUICK = Plan(loads=1, rounds=1, steps=2, mixed_seconds=0.5)


def run(models: Sequence[BenchModel], other: Path, plan: Plan, progress: Progress) -> Outcome:
    """Measure both checkouts with every model."""
    interpreter = other / ".venv" / "bin" / "python"
    if not interpreter.is_file():
        raise ConfigError(f"{other} has no .venv/bin/python: run `make test` there once")
    commands = {OURS: sys.executable, OTHER: str(interpreter.absolute())}
    found, turns = dict[str, Times](), Turns()
    for model in models:
        times = found.setdefault(model.title, {})
        for load in range(plan.loads):
            progress(f"{model.title}: starting both sides, {load + 1} of {plan.loads}")
            with _started(model, commands) as workers:
                turns.measure(
                    workers, plan.cases, plan.rounds, lambda case, side: case.ask(side, plan), times
                )
    return outcome(found, other, plan, turns)


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
            command = (python, "-m", "bench.runtime.before_worker")
            worker = stack.enter_context(Worker(side, command))
            sizes = {"slots": _SLOTS, "context": _CONTEXT}
            worker.ask("load", settings={**told, **sizes, "cache_dir": str(cache)})
            workers[side] = worker
        yield workers


def outcome(found: Mapping[str, Times], other: Path, plan: Plan, turns: Turns) -> Outcome:
    """A table for each model."""
    tables, wanted = [], []
    for title, cases in found.items():
        rows = []
        for case in plan.cases:
            times = cases[case.title]
            speedup = Summary.of(ratios(times[OTHER], times[OURS]))
            share = Summary.of(ratios(times[OURS], times[OTHER]))
            both = (spread(Summary.of(times[side])) for side in (OTHER, OURS))
            rows.append((case.title, *both, spread(share), spread(speedup)))
            if case.most:
                what = f"{title}, {case.title}: times as fast"
                wanted.append(Wanted(what, 1 / case.most, speedup.median))
        columns = ("step", f"{OTHER}, ms", f"{OURS}, ms", "share of its time", "times as fast")
        notes = (
            f"{plan.loads} starts, {plan.rounds} rounds, {plan.steps} steps each: whole steps of "
            "the scheduler behind prompts of 200 tokens; a prompt from its arrival to its first "
            f"token; prompts that arrive one after the other for {plan.mixed_seconds:g} s in every "
            "third round; medians with quartiles, ratios round by round",
            turns.told,
            "tokens of a request beyond the first are draft tokens that it verifies and rejects",
        )
        tables.append(Table(f"Steps against another checkout: {title}", columns, rows, notes))
    result = {"other": other.name, "plan": asdict(plan), "milliseconds": found}
    return Outcome(result, tables, wanted=wanted)
