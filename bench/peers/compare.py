"""Single passes against llama.cpp and OpenVINO: the same shape, the same passes, one run.

All sides are up at once and take turns, case by case: one computes while the others are seen to
be idle. Ratios are taken round by round, so that whatever the machine does meets every side.
Several starts are measured, each from the disk, since how weights fall into memory pages moves
single-token passes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.memory.page_cache import evict
from bench.models import BenchModel, Progress
from bench.peers.models import LLAMA_CPP, OPENVINO
from bench.peers.protocol import prompt
from bench.serving.server import environment
from bench.tools.quiet import Times, Turns
from bench.tools.report import Outcome, Table, Wanted, spread
from bench.tools.stats import Summary, ratios
from bench.tools.worker import Worker, WorkerError
from specops.config import Settings

OURS = "specops"
_PAST = 200
_ROWS = 8
_CAPACITY = 640  # tokens per row: the longest case and some room
_AGREEMENT = 0.5  # least correlation of logits: other rounding, but the same model
_AGREEMENT_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of pass: `rows` rows take `tokens` tokens each, or a prompt of `tokens` tokens.

    `wanted` is how many times as fast as the fastest of `against` ours is to be.
    """

    title: str
    rows: int = 1
    tokens: int = 1
    prefill: bool = False
    wanted: float | None = None
    against: tuple[str, ...] = (LLAMA_CPP, OPENVINO)

    @property
    def seldom(self) -> bool:
        """Whether it takes as long as all others together."""
        return self.prefill

    def ask(self, worker: Worker, passes: int, vocab: int) -> list[float]:
        """Seconds of each pass."""
        if self.prefill:
            answer = worker.ask("prefill", tokens=prompt(self.tokens, vocab))
        else:
            asked = {"rows": self.rows, "tokens": self.tokens, "past": _PAST, "passes": passes}
            answer = worker.ask("measure", **asked)
        return [float(seconds) for seconds in answer["seconds"]]


CASES = (
    Case("1 token", wanted=1.2),
    Case("2 tokens", tokens=2),
    Case("3 tokens", tokens=3, wanted=1.3),
    Case("4 tokens", tokens=4),
    Case("8 tokens", tokens=8),
    Case("4 rows x 1 token", rows=4, wanted=1.0),
    Case("8 rows x 1 token", rows=8, wanted=0.9),
    Case("prefill 512", tokens=512, prefill=True, wanted=0.9, against=(OPENVINO,)),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of every case after each of `loads` starts."""

    loads: int
    rounds: int
    passes: int  # of a side in a round; its time is their median
    cases: tuple[Case, ...] = CASES


FULL = Plan(loads=2, rounds=9, passes=3)
QUICK = Plan(loads=1, rounds=2, passes=3)


@dataclass(frozen=True, slots=True)
class SideProcess:
    """How a side is started and what it loads, from files in the folder `weights`."""

    command: tuple[str, ...]
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)
    weights: Path | None = None


@dataclass(slots=True)
class Measured:
    """All rounds in the order in which they ran."""

    plan: Plan
    threads: int
    runs_on: dict[str, str] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)  # correlation with our logits
    ms: Times = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)


def sides(
    model: BenchModel, threads: int, python: Path, files: Mapping[str, Path]
) -> dict[str, SideProcess]:
    """Ours and the peers, ready to be started."""
    modules = {LLAMA_CPP: "llama_worker", OPENVINO: "openvino_worker"}
    peers = {name: peer(python, module, files[name]) for name, module in modules.items()}
    return {OURS: ours(model.settings, threads), **peers}


def ours(settings: Settings, threads: int) -> SideProcess:
    """Our process, ready to be started."""
    sizes = {"slots": _ROWS, "context": _CAPACITY, "kv_tokens": _ROWS * _CAPACITY}
    told = replace(settings, threads=threads, **sizes)
    command = (sys.executable, "-m", "bench.peers.ours_worker")
    return SideProcess(command, told.target, environment(told), told.cache_dir)


def peer(python: Path, module: str, model: Path) -> SideProcess:
    """A peer's process, ready to be started."""
    command = (str(python), "-m", f"bench.peers.{module}")
    return SideProcess(command, str(model), weights=model.parent)


@contextlib.contextmanager
def loaded(
    name: str, side: SideProcess, threads: int, rows: int = _ROWS, capacity: int = _CAPACITY
) -> Iterator[tuple[Worker, str]]:
    """A process with its model, and what it runs on, in words."""
    with Worker(name, side.command, side.environment) as worker:
        sizes = {"threads": threads, "rows": rows, "capacity": capacity}
        yield worker, worker.ask("load", model=side.model, **sizes)["runs_on"]


def from_disk(processes: Iterable[SideProcess]) -> None:
    """Have sides that are started next read their weights from the disk."""
    for side in processes:
        if side.weights is not None:
            evict(side.weights)


def measure(
    processes: Mapping[str, SideProcess], plan: Plan, *, threads: int, vocab: int,
    progress: Progress, turns: Turns | None = None,
) -> Measured:  # fmt: skip
    """Time every case on every side."""
    measured = Measured(plan, threads, turns=turns or Turns())
    for load in range(plan.loads):
        progress(f"starting all sides, {load + 1} of {plan.loads}")
        from_disk(processes.values())
        with contextlib.ExitStack() as stack:
            workers = {}
            for name, side in processes.items():
                opened = stack.enter_context(loaded(name, side, threads))
                workers[name], measured.runs_on[name] = opened
            _agree(workers, measured, vocab)

            def ask(case: Case, worker: Worker) -> list[float]:
                return case.ask(worker, plan.passes, vocab)

            measured.turns.measure(workers, plan.cases, plan.rounds, ask, measured.ms)
    return measured


def _agree(workers: Mapping[str, Worker], measured: Measured, vocab: int) -> None:
    """See that all compute the same, as far as their weights allow."""
    tokens = prompt(_AGREEMENT_TOKENS, vocab)
    logits = {
        name: worker.ask("logits", tokens=tokens)["logits"] for name, worker in workers.items()
    }
    for name, theirs in logits.items():
        measured.agreement[name] = agreement = float(np.corrcoef(logits[OURS], theirs)[0, 1])
        if not agreement >= _AGREEMENT:
            raise WorkerError(f"{name} computes something else: logits agree by {agreement:.2f}")


def fastest(times: Mapping[str, Sequence[float]], against: Iterable[str]) -> tuple[str, Summary]:
    """The fastest of these peers, and how many times as fast ours is, round by round."""
    rival = min(against, key=lambda peer: Summary.of(times[peer]).median)
    return rival, Summary.of(ratios(times[rival], times[OURS]))


def outcome(title: str, measured: Measured) -> Outcome:
    """A row per case: milliseconds of every side, and ours against the better of the others."""
    names = list(measured.runs_on)
    rows, cases, wanted = [], [], []
    for case in measured.plan.cases:
        ms = measured.ms[case.title]
        rival, ratio = fastest(ms, case.against)
        times = (spread(Summary.of(ms[name]), 1) for name in names)
        rows.append((case.title, *times, spread(ratio), rival))
        cases.append({**asdict(case), "rival": rival, "ratio": asdict(ratio), "milliseconds": ms})
        if case.wanted:
            what = f"{case.title}: times as fast as {rival}"
            wanted.append(Wanted(what, case.wanted, ratio.median))
    columns = ("pass", *(f"{name}, ms" for name in names), "ratio", "against")
    table = Table(f"Against its peers: {title}", columns, rows, _notes(measured))
    result = {"threads": measured.threads, "past_tokens": _PAST, "runs_on": measured.runs_on}
    result |= {"agreement": measured.agreement, "turns": asdict(measured.turns), "cases": cases}
    return Outcome(result, [table], wanted=wanted)


def versions(runs_on: Mapping[str, str], threads: int) -> str:
    """A note on what each side ran on."""
    sides = "; ".join(f"{name}: {version}" for name, version in runs_on.items())
    return f"{sides}; {threads} threads each, everything else by default"


def _notes(measured: Measured) -> tuple[str, ...]:
    plan = measured.plan
    agreeing = ", ".join(
        f"{name} {value:.3f}" for name, value in measured.agreement.items() if name != OURS
    )
    return (
        "ratio: how many times as fast as the faster peer, round by round with quartiles; a pass "
        f"has {_PAST} tokens of keys and values behind it, a prefill none",
        versions(measured.runs_on, measured.threads),
        f"weights: {OURS} int4 in blocks of 128, head and embedding int8; {LLAMA_CPP} Q4_0, head "
        f"Q6_K; {OPENVINO} int4 symmetric in groups of 128, head and embedding int8",
        f"{plan.loads} starts from the disk x {plan.rounds} rounds, prefill in every third; "
        f"correlation with {OURS}'s logits: {agreeing}; {measured.turns.told}",
    )
