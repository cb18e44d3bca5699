"""Compares this checkout with another, such as the commit before a change: same steps, in turns.

Each side is a process with its checkout's interpreter, so old and new code share only
`before_worker`, which calls the engine and its scheduler. Both are loaded at once and take turns,
case by case: one computes while the other is idle. Ratios are computed round by round.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.memory.cgroup import evict
from bench.models import BenchModel
from bench.tools.quiet import Case, Turns
from bench.tools.report import Outcome, Summary, Table, Target, progress, ratios
from bench.tools.worker import Worker
from specops.config import ConfigError
from specops.runtime.kernels import NAMES

OURS, OTHER = "this checkout", "the other"
KERNELS = [name for name in ("AVX512-VNNI", "AVX2") if name in NAMES] or NAMES[:1]
"""The kernels that are compared one by one: the fastest of most servers, and of the others."""
_SLOTS, _CONTEXT = 8, 1024
_WORKER = "bench.runtime.before_worker"
_LEAST = 0.98  # times as fast as the other: "no slower", within the machine's noise
_FORCED = """import runpy, sys
from specops.runtime.kernels import force
force(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of every case after each of `loads` starts."""

    loads: int
    rounds: int
    steps: int  # per side and round; their median counts
    mixed_seconds: float

    def cases(self) -> list[Case]:
        """Steps, a prompt, and prompts next to streams."""

        def steps(title: str, streams: int, draft_tokens: int = 0) -> Case:
            asked = {"streams": streams, "draft_tokens": draft_tokens, "steps": self.steps}
            return Case(title, lambda worker: worker.ask("steps", **asked))

        mixed = {"streams": 4, "tokens": 256, "seconds": self.mixed_seconds}
        return [
            steps("1 token", 1),
            steps("4 requests of one token", 4),
            steps("8 requests of one token", 8),
            steps("1 request of 4 tokens", 1, 3),
            steps("4 requests of 4 tokens", 4, 3),
            Case("prompt of 512", lambda worker: worker.ask("prompt", tokens=512)),
            Case("prompts next to 4 streams, per token of both",
                 lambda worker: worker.ask("mixed", **mixed), seldom=True),
        ]  # fmt: skip


FULL = Plan(loads=2, rounds=9, steps=12, mixed_seconds=10.0)
QUICK = Plan(loads=1, rounds=1, steps=2, mixed_seconds=0.5)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the ways to compute that share a checkout's process, such as one of its kernels."""

    worker: Worker
    do: str  # what the worker is asked to do
    asked: Mapping[str, str]

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self.worker.pid

    def ask(self, **values: object) -> Any:
        """Seconds of each pass."""
        return self.worker.ask(self.do, **values, **self.asked)


def run(models: Sequence[BenchModel], other: Path, plan: Plan, kernels: str | None) -> Outcome:
    """Measure both checkouts with every model; see `Plan` and `kernels.force`."""
    found: dict[str, Turns] = {}
    for model in models:
        turns = found[model.title] = Turns()
        for load in range(plan.loads):
            progress(f"{model.title}: starting both sides, {load + 1} of {plan.loads}")
            with checkouts(other, _WORKER, kernels) as workers:
                _load(model, workers)
                turns.measure(workers, plan.cases(), plan.rounds)
    return outcome(found, other, plan, kernels)


def interpreter_of(other: Path) -> str:
    """The interpreter of another checkout's environment.

    Raises:
        ConfigError: the checkout has no environment.
    """
    interpreter = other / ".venv" / "bin" / "python"
    if not interpreter.is_file():
        raise ConfigError(f"{other} has no .venv/bin/python: run `make test` there once")
    return str(interpreter.absolute())


def module_command(python: str, module: str, kernels: str | None) -> list[str]:
    """The command that runs a module, if need be with other kernels than the fastest."""
    return [python, "-c", _FORCED, kernels, module] if kernels else [python, "-m", module]


@contextlib.contextmanager
def checkouts(other: Path, module: str, kernels: str | None = None) -> Iterator[dict[str, Worker]]:
    """A process of this checkout and one of another, both of which run a module.

    Raises:
        ConfigError: the other checkout has no environment.
    """
    with contextlib.ExitStack() as stack:
        yield {
            side: stack.enter_context(Worker(side, module_command(python, module, kernels)))
            for side, python in ((OURS, sys.executable), (OTHER, interpreter_of(other)))
        }


def _load(model: BenchModel, workers: Mapping[str, Worker]) -> None:
    settings = model.settings
    names = ("model", "target", "draft", "quant", "draft_quant", "threads", "prefix_cache")
    own = {name: getattr(settings, name) for name in names}
    own |= {"slots": _SLOTS, "context": _CONTEXT}
    for number, worker in enumerate(workers.values()):
        cache = settings.cache_dir / f"before-{number}"  # each side's weight tiles and costs
        if cache.is_dir():
            evict(cache)  # the place of weights in memory must not favour one side
        worker.ask("load", settings={**own, "cache_dir": str(cache)})


def outcome(found: Mapping[str, Turns], other: Path, plan: Plan, kernels: str | None) -> Outcome:
    """A table for each model."""
    tables, targets = [], []
    for title, turns in found.items():
        rows = []
        for case in plan.cases():
            times = turns.ms[case.title]
            speedup = Summary.of(ratios(times[OTHER], times[OURS]))
            share = Summary.of(ratios(times[OURS], times[OTHER]))
            both = (Summary.of(times[side]).spread() for side in (OTHER, OURS))
            rows.append((case.title, *both, share.spread(), speedup.spread()))
            what = f"{title}, {case.title}: times as fast"
            targets.append(Target(what, _LEAST, speedup.median))
        columns = ("step", f"{OTHER}, ms", f"{OURS}, ms", "share of its time", "times as fast")
        notes = (
            f"{plan.loads} starts, {plan.rounds} rounds, {plan.steps} steps each: whole steps of "
            "the scheduler after prompts of 200 tokens; a prompt from its arrival to its first "
            f"token; prompts that arrive one after the other for {plan.mixed_seconds:g} s in every "
            "third round; medians with quartiles, ratios round by round",
            f"kernels: {kernels or NAMES[0]}",
            turns.note,
            "a request's tokens beyond the first are draft tokens, which it rejects",
        )
        tables.append(Table(f"Steps against another checkout: {title}", columns, rows, notes))
    milliseconds = {title: turns.ms for title, turns in found.items()}
    result = {"other": other.name, "plan": asdict(plan), "milliseconds": milliseconds}
    return Outcome(result, tables, targets=targets)
