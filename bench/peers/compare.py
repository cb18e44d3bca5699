"""Single passes against llama.cpp and OpenVINO: the same shape and the same passes in one run.

All sides run at once and take turns, case by case: one computes while the others are idle. Ratios
are taken round by round, so that a change of the machine meets every side. Several starts are
measured, each from the disk, because where the weights lie in memory changes the time of
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
from bench.models import TINYLLAMA_VOCAB, tinyllama
from bench.peers.environment import install
from bench.peers.models import LLAMA_CPP, OPENVINO, peer_models
from bench.peers.protocol import prompt
from bench.serving.server import environment
from bench.tools.quiet import Case, Turns
from bench.tools.report import Outcome, Summary, Table, Target, progress
from bench.tools.worker import Worker, WorkerError
from specops.config import Settings

OURS = "specops"
THREADS = 2  # of each side
_PAST = 200
_ROWS = 8
_CAPACITY = 640  # tokens per row: the longest case and some room
_AGREEMENT = 0.5  # least correlation of logits: the same model with other rounding
_AGREEMENT_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of every case after each of `loads` starts.

    A side computes `passes` passes in a round; its time is their median.
    """

    loads: int
    rounds: int
    passes: int


FULL = Plan(loads=2, rounds=9, passes=3)
QUICK = Plan(loads=1, rounds=2, passes=3)


def decoding(
    title: str, passes: int, *, rows: int = 1, tokens: int = 1, target: float | None = None
) -> Case:
    """Passes of `tokens` tokens in each of `rows` rows."""
    asked = {"rows": rows, "tokens": tokens, "past": _PAST, "passes": passes}
    return Case(title, lambda worker: worker.ask("measure", **asked), target)


def prefill(title: str, tokens: int, vocab: int, target: float | None = None) -> Case:
    """A prompt of `tokens` tokens."""
    ids = prompt(tokens, vocab)
    against = (OPENVINO,) if target else ()
    return Case(title, lambda worker: worker.ask("prefill", tokens=ids), target, against, True)


def cases(passes: int, vocab: int) -> list[Case]:
    """All kinds of passes, with their targets."""
    return [
        decoding("1 token", passes, target=1.2),
        decoding("2 tokens", passes, tokens=2),
        decoding("3 tokens", passes, tokens=3, target=1.3),
        decoding("4 tokens", passes, tokens=4),
        decoding("8 tokens", passes, tokens=8),
        decoding("4 rows x 1 token", passes, rows=4, target=1.0),
        decoding("8 rows x 1 token", passes, rows=8, target=0.9),
        prefill("prefill 512", 512, vocab, target=0.9),
    ]


@dataclass(frozen=True, slots=True)
class SideProcess:
    """How a side is started, and the model that it loads, whose files are in `weights`."""

    command: tuple[str, ...]
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)
    weights: Path | None = None

    @classmethod
    def ours(cls, settings: Settings) -> SideProcess:
        """Our process, ready to be started."""
        sizes = {"slots": _ROWS, "context": _CAPACITY, "kv_tokens": _ROWS * _CAPACITY}
        own = replace(settings, threads=THREADS, **sizes)
        command = (sys.executable, "-m", "bench.peers.ours_worker")
        return cls(command, own.target, environment(own), own.cache_dir)

    @classmethod
    def peer(cls, python: Path, module: str, model: Path) -> SideProcess:
        """A peer's process, ready to be started."""
        command = (str(python), "-m", f"bench.peers.{module}")
        return cls(command, str(model), weights=model.parent)


@dataclass(slots=True)
class Measured:
    """What was measured.

    Attributes:
        runs_on: in words, what each side runs on.
        agreement: how far each side agrees with ours.
    """

    plan: Plan
    turns: Turns = field(default_factory=Turns)
    runs_on: dict[str, str] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)

    @property
    def versions(self) -> str:
        """A note on what each side ran on."""
        sides = "; ".join(f"{name}: {version}" for name, version in self.runs_on.items())
        return f"{sides}; {THREADS} threads each, everything else by default"


@contextlib.contextmanager
def loaded(
    name: str, side: SideProcess, rows: int = _ROWS, capacity: int = _CAPACITY
) -> Iterator[tuple[Worker, str]]:
    """A process with its model, and what it runs on, in words."""
    with Worker(name, side.command, side.environment) as worker:
        sizes = {"threads": THREADS, "rows": rows, "capacity": capacity}
        yield worker, worker.ask("load", model=side.model, **sizes)


def from_disk(processes: Iterable[SideProcess]) -> None:
    """Have sides that start next read their weights from the disk."""
    for side in processes:
        if side.weights is not None:
            evict(side.weights)


def peers(python: Path, **modules: str) -> dict[str, SideProcess]:
    """The peers' processes with the models that are made for them."""
    files = peer_models(python)
    return {
        LLAMA_CPP: SideProcess.peer(python, modules["llama"], files[LLAMA_CPP]),
        OPENVINO: SideProcess.peer(python, modules["openvino"], files[OPENVINO]),
    }


def run(plan: Plan) -> Outcome:
    """Measure TinyLlama's shape on all sides."""
    others = peers(install(), llama="llama_worker", openvino="openvino_worker")
    model = tinyllama()
    asked = cases(plan.passes, TINYLLAMA_VOCAB)
    sides = {OURS: SideProcess.ours(model.settings), **others}
    return outcome(model.title, asked, measure(sides, asked, plan, TINYLLAMA_VOCAB))


def measure(
    processes: Mapping[str, SideProcess],
    asked: Sequence[Case],
    plan: Plan,
    vocab: int,
    turns: Turns | None = None,
) -> Measured:
    """Time every case on every side; the first side is ours."""
    measured = Measured(plan, turns or Turns())
    for load in range(plan.loads):
        progress(f"starting all sides, {load + 1} of {plan.loads}")
        from_disk(processes.values())
        with contextlib.ExitStack() as stack:
            workers = {}
            for name, side in processes.items():
                workers[name], measured.runs_on[name] = stack.enter_context(loaded(name, side))
            _agree(workers, measured, vocab)
            measured.turns.measure(workers, asked, plan.rounds)
    return measured


def _agree(workers: Mapping[str, Worker], measured: Measured, vocab: int) -> None:
    """Check that all sides compute the same, as far as their weights allow."""
    tokens = prompt(_AGREEMENT_TOKENS, vocab)
    logits = {name: worker.ask("logits", tokens=tokens) for name, worker in workers.items()}
    for name, theirs in logits.items():
        measured.agreement[name] = agreement = float(np.corrcoef(logits[OURS], theirs)[0, 1])
        if not agreement >= _AGREEMENT:
            raise WorkerError(f"{name} computes something else: logits agree by {agreement:.2f}")


def outcome(title: str, asked: Sequence[Case], measured: Measured) -> Outcome:
    """A row per case: milliseconds of every side, and ours against the fastest peer."""
    names, plan, turns = list(measured.runs_on), measured.plan, measured.turns
    rows, record, targets = [], [], []
    for case in asked:
        rival, ratio = turns.rival(case.title, case.against)
        ms = turns.ms[case.title]
        times = (Summary.of(ms[name]).spread(1) for name in names)
        rows.append((case.title, *times, ratio.spread(), rival))
        record.append({"title": case.title, "rival": rival, "ratio": asdict(ratio)})
        if case.target:
            what = f"{case.title}: times as fast as {rival}"
            targets.append(Target(what, case.target, ratio.median))
    agreeing = ", ".join(
        f"{name} {value:.3f}" for name, value in measured.agreement.items() if name != OURS
    )
    notes = (
        "ratio: how many times as fast as the faster peer, round by round with quartiles; a pass "
        f"has {_PAST} tokens of keys and values behind it, a prefill none",
        measured.versions,
        f"weights: {OURS} int4 in blocks of 128, head and embedding int8; {LLAMA_CPP} Q4_0, head "
        f"Q6_K; {OPENVINO} int4 symmetric in groups of 128, head and embedding int8",
        f"{plan.loads} starts from the disk x {plan.rounds} rounds, prefill in every third; "
        f"correlation with {OURS}'s logits: {agreeing}; {turns.note}",
    )
    columns = ("pass", *(f"{name}, ms" for name in names), "ratio", "against")
    table = Table(f"Against its peers: {title}", columns, rows, notes)
    result = {"threads": THREADS, "past_tokens": _PAST, "runs_on": measured.runs_on}
    result |= {"agreement": measured.agreement, "turns": asdict(turns), "cases": record}
    return Outcome(result, [table], targets=targets)
