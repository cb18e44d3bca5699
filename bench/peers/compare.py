"""Times single passes against llama.cpp and OpenVINO: the same files and passes in one run.

All sides are loaded at once and take turns, case by case: one computes while the others are idle.
Ratios are computed round by round, so that a change of the machine affects every side. Several
starts are measured, each from the disk, because the place of the weights in memory changes the time
of single-token passes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.memory.cgroup import evict
from bench.models import TINYLLAMA_VOCAB
from bench.peers.models import INT4, LLAMA_CPP, OPENVINO, OURS, Lineup, lineups
from bench.peers.protocol import prompt
from bench.serving.server import environment
from bench.tools.quiet import Case, Turns
from bench.tools.report import Outcome, Summary, Table, Target, progress, ratios
from bench.tools.worker import Worker, WorkerError
from specops.config import Settings

THREADS = 2  # of each side
PEERS = (LLAMA_CPP, OPENVINO)
_PAST = 200
_ROWS = 8
_CAPACITY = 640  # tokens per row: enough for the longest case
_AGREEMENT = 0.5  # minimum correlation of logits: the same model, rounded differently
_AGREEMENT_TOKENS = 40
_ONE, _EIGHT, _PREFILL = "1 token", "8 tokens", "prompt of 512"
# Minimum speed relative to a peer, by weights and pass; maximum time per byte, relative to Q4_0.
_TARGETS = {
    (INT4, _ONE, LLAMA_CPP): 1.2,
    (INT4, _PREFILL, OPENVINO): 0.9,
    ("Q4_K_M", _ONE, LLAMA_CPP): 1.55,
    ("Q4_K_M", _EIGHT, LLAMA_CPP): 2.41,
    ("Q4_K_M", _PREFILL, LLAMA_CPP): 2.06,
}
_PER_BYTE = {"Q4_K_M": 1.05, "Q5_K_M": 1.05, "IQ4_XS": 1.08}

Sides = Mapping[str, str]
"""The names of the compared processes, by engine; the first is ours."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of every case after each of `loads` starts.

    A side computes `passes` passes in a round; its time is their median.
    """

    loads: int
    rounds: int
    passes: int


FULL = Plan(loads=2, rounds=4, passes=3)
QUICK = Plan(loads=1, rounds=1, passes=1)


def decoding(title: str, passes: int, *, rows: int = 1, tokens: int = 1) -> Case:
    """Passes of `tokens` tokens in each of `rows` rows."""
    asked = {"rows": rows, "tokens": tokens, "past": _PAST, "passes": passes}
    return Case(title, lambda worker: worker.ask("measure", **asked))


def prefill(title: str, tokens: int, vocab: int) -> Case:
    """A prompt of `tokens` tokens."""
    ids = prompt(tokens, vocab)
    return Case(title, lambda worker: worker.ask("prefill", tokens=ids), seldom=True)


def cases(passes: int, vocab: int) -> list[Case]:
    """All kinds of passes, each `passes` times per round."""
    return [
        decoding(_ONE, passes),
        decoding("4 tokens", passes, tokens=4),
        decoding(_EIGHT, passes, tokens=8),
        decoding("8 rows x 1 token", passes, rows=8),
        prefill(_PREFILL, 512, vocab),
    ]


@dataclass(frozen=True, slots=True)
class SideProcess:
    """How to start a side, and its model, whose files are in `weights`."""

    command: tuple[str, ...]
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)
    weights: Path | None = None

    @classmethod
    def ours(cls, settings: Settings) -> SideProcess:
        """Our process."""
        sizes = {"slots": _ROWS, "context": _CAPACITY, "kv_tokens": _ROWS * _CAPACITY}
        own = replace(settings, threads=THREADS, **sizes)
        command = (sys.executable, "-m", "bench.peers.ours_worker")
        return cls(command, own.target, environment(own), own.cache_dir)

    @classmethod
    def peer(cls, python: Path, module: str, model: Path) -> SideProcess:
        """A peer's process.

        Args:
            python: interpreter of the peers' environment.
            module: name of the worker's module.
            model: the model's file.
        """
        command = (str(python), "-m", f"bench.peers.{module}")
        return cls(command, str(model), weights=model.parent)


@dataclass(slots=True)
class Measured:
    """The results of a comparison.

    Attributes:
        plan: how much was measured.
        sides: the compared processes, by kind of weights.
        turns: the measured times.
        runs_on: name and version of each process's engine.
        agreement: agreement with our output, by kind of weights and peer.
    """

    plan: Any
    sides: Mapping[str, Sides]
    turns: Turns = field(default_factory=Turns)
    runs_on: dict[str, str] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for every table of a comparison with peers."""
        versions = "; ".join(dict.fromkeys(self.runs_on.values()))
        return (
            "over a peer: times as fast, round by round, with quartiles",
            f"{versions}; {THREADS} threads each; {OURS} and {LLAMA_CPP} read the same GGUF, for "
            f"{INT4} {LLAMA_CPP} has Q4_0; {OPENVINO} has int4 symmetric in groups of 128, head "
            "and embedding int8",
            self.turns.note,
        )

    def agreeing(self) -> str:
        """The agreement of all peers, in words."""
        return ", ".join(f"{name} {value:.2f}" for name, value in self.agreement.items())

    def table(
        self,
        title: str,
        columns: tuple[str, str],
        figures: Mapping[str, Callable[[float], float]],
        notes: Sequence[str],
    ) -> tuple[Table, list[dict[str, Any]]]:
        """A row for each kind of weights and case, and the same for programs.

        Args:
            title: title of the table.
            columns: what a case is, and the unit of the figures.
            figures: for each case, the conversion of milliseconds to that unit.
            notes: notes in front of the common ones.
        """
        rows, record = [], []
        for weights in self.sides:
            for case, figure in figures.items():
                times = self.times(weights, case)
                found = {one: Summary.of([figure(ms) for ms in times[one]]) for one in times}
                theirs = [peer for peer in PEERS if peer in times]
                over = {peer: Summary.of(ratios(times[peer], times[OURS])) for peer in theirs}
                cells = [found[one].spread(1) if one in found else "" for one in (OURS, *PEERS)]
                cells += [over[peer].spread() if peer in over else "" for peer in PEERS]
                rows.append((weights, case, *cells))
                spreads = {key: {one: asdict(item) for one, item in value.items()}
                           for key, value in (("figures", found), ("over", over))}  # fmt: skip
                record.append({"weights": weights, "case": case, **spreads})
        case, unit = columns
        heads = [f"{engine}, {unit}" for engine in (OURS, *PEERS)]
        heads += [f"over {peer}" for peer in PEERS]
        return Table(title, ("weights", case, *heads), rows, (*notes, *self.notes)), record

    def targets(self, least: Mapping[tuple[str, str, str], float]) -> list[Target]:
        """Targets from the minimum speed relative to a peer, by weights, case and peer."""
        found = []
        for (weights, case, peer), line in least.items():
            if weights in self.sides and case in self.turns.ms:
                times = self.times(weights, case)
                over = Summary.of(ratios(times[peer], times[OURS])).median
                found.append(Target(f"{weights}, {case}: times as fast as {peer}", line, over))
        return found

    def times(self, weights: str, case: str) -> dict[str, list[float]]:
        """Milliseconds by engine, round by round."""
        return {engine: self.turns.ms[case][name] for engine, name in self.sides[weights].items()}


@contextlib.contextmanager
def loaded(
    name: str, side: SideProcess, rows: int = _ROWS, capacity: int = _CAPACITY, **more: int
) -> Iterator[tuple[Worker, str]]:
    """Start a process and load its model.

    Args:
        name: its name in errors.
        side: how to start it.
        rows: number of sequences.
        capacity: tokens per sequence.
        more: further options of its `load`.

    Yields:
        The process, and the name and version of its engine.
    """
    with Worker(name, side.command, side.environment) as worker:
        sizes = {"threads": THREADS, "rows": rows, "capacity": capacity, **more}
        yield worker, worker.ask("load", model=side.model, **sizes)


def from_disk(processes: Iterable[SideProcess]) -> None:
    """Evict weights, so that the sides read them from the disk when they start."""
    for folder in {side.weights for side in processes if side.weights is not None}:
        evict(folder)


def peers(
    python: Path, lineup: Lineup, *, openvino: str = "openvino_worker"
) -> dict[str, SideProcess]:
    """The processes of a lineup's peers."""
    modules = {LLAMA_CPP: "llama_worker", OPENVINO: openvino}
    return {
        lineup.sides[peer]: SideProcess.peer(python, modules[peer], file)
        for peer, file in lineup.files.items()
    }


def run(plan: Plan, cache: Path) -> Outcome:
    """Measure all kinds of weights on all sides."""
    python, entered = lineups(cache)
    processes = {}
    for lineup in entered:
        processes[lineup.sides[OURS]] = SideProcess.ours(lineup.model.settings)
        processes |= peers(python, lineup)
    sides = {lineup.weights: lineup.sides for lineup in entered}
    asked = cases(plan.passes, TINYLLAMA_VOCAB)
    nbytes = {one.weights: one.files[LLAMA_CPP].stat().st_size for one in entered}
    return outcome(nbytes, measure(processes, sides, asked, plan, TINYLLAMA_VOCAB))


def measure(
    processes: Mapping[str, SideProcess],
    sides: Mapping[str, Sides],
    asked: Sequence[Case],
    plan: Plan,
    vocab: int,
    *,
    turns: Turns | None = None,
) -> Measured:
    """Time every case in every process.

    Args:
        processes: the processes by name.
        sides: the processes to compare with each other, by kind of weights.
        asked: the cases.
        plan: how much to measure.
        vocab: size of the vocabulary.
        turns: collects the times; None: a new one.
    """
    measured = Measured(plan, sides, turns or Turns())
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
    """Check that the sides compute the same, as far as their weights allow."""
    tokens = prompt(_AGREEMENT_TOKENS, vocab)
    logits = {name: worker.ask("logits", tokens=tokens) for name, worker in workers.items()}
    for weights, compared in measured.sides.items():
        ours, *others = compared.values()
        for name in others:
            agreement = float(np.corrcoef(logits[ours], logits[name])[0, 1])
            measured.agreement[f"{weights} and {name}"] = agreement
            if not agreement >= _AGREEMENT:
                raise WorkerError(
                    f"{name} computes something else than {ours}: logits agree by {agreement:.2f}"
                )


def outcome(nbytes: Mapping[str, int], measured: Measured) -> Outcome:
    """A row per kind of weights and pass; `nbytes` are the sizes of our files in bytes."""
    plan, turns = measured.plan, measured.turns
    sizes = ", ".join(f"{weights} {size / 1e6:,.0f}" for weights, size in nbytes.items())
    notes = (
        f"TinyLlama-1.1B's shape, random weights, quantized by {LLAMA_CPP}, and a real chat model; "
        f"MB of {LLAMA_CPP}'s files: {sizes}",
        f"passes follow {_PAST} tokens, prompts none; {plan.loads} starts from the disk x "
        f"{plan.rounds} rounds, prompts in every third",
        f"{LLAMA_CPP}: repacked weights and flash attention, its defaults and fastest settings; "
        f"correlation of logits: {measured.agreeing()}",
    )
    same = dict.fromkeys(turns.ms, lambda ms: ms)
    table, record = measured.table("Against its peers", ("pass", "ms"), same, notes)
    targets = measured.targets(_TARGETS)
    ms = turns.ms[_ONE]
    for weights, most in _PER_BYTE.items():
        ours, plainest = (ms[measured.sides[one][OURS]] for one in (weights, "Q4_0"))
        ratio = Summary.of(ratios(ours, plainest)).median * nbytes["Q4_0"] / nbytes[weights]
        what = f"{weights}, {_ONE}: time per byte of the file, over Q4_0's"
        targets.append(Target(what, most, ratio, at_most=True))
    result = {"threads": THREADS, "past_tokens": _PAST, "runs_on": measured.runs_on}
    result |= {"agreement": measured.agreement, "turns": asdict(turns), "cases": record}
    return Outcome(result | {"file_bytes": nbytes}, [table], targets=targets)
