"""Whole requests that all arrive at once: our service over HTTP beside the peers' own batching.

A case is a number of clients. Each sends a prompt and waits for its answer; the time runs from
the first one's sending to the last one's last token, prompts included. Ours is the real service in
a process of its own, asked over connections that stream; the peers are called directly, which
spares them HTTP and text. Sides take turns round by round as in `compare`, with the same prompts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.models import BenchModel, Progress
from bench.page_cache import evict
from bench.peers.compare import OURS, SideProcess, from_disk, versions
from bench.peers.http_side import HttpSide
from bench.peers.models import LLAMA_CPP, OPENVINO
from bench.peers.worker import Worker, WorkerError
from bench.quiet import cpu_seconds, machine_seconds, main_thread_seconds, settle
from bench.report import Table, spread, yes
from bench.server import serving
from bench.stats import Summary, ratios, rotated
from specops.tokenizer import Tokenizer

PROMPT, OUTPUT = 200, 64  # tokens of a request
_CAPACITY = 512  # tokens per row
_WANTED = {1: 1.6, 2: 1.7, 4: 1.6, 8: 1.5}  # of the faster peer's throughput, by clients
_STRANGERS = 0.2  # of a core: what others may take while a side is timed
_UNSURE_SECONDS = 0.02  # what the kernel's count for the whole machine may be off
_ATTEMPTS = 5
_AGREEMENT = 0.1  # least share of prompts that a peer goes on from with one of our five likeliest
_AGREEMENT_PROMPTS = 8

Prompts = Sequence[Sequence[int]]


class Side(Protocol):
    """Answers requests that arrive at once."""

    @property
    def pid(self) -> int:
        """The process that computes."""

    def complete(self, prompts: Prompts, output: int) -> tuple[float, list[Any]]:
        """Generate `output` tokens for each prompt; seconds, and what each answer begins with."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    clients: tuple[int, ...] = (1, 2, 4, 8)
    output: int = OUTPUT


@dataclass(slots=True)
class Measured:
    """All rounds in the order in which they ran, those of earlier runs first."""

    threads: int
    output: int
    runs_on: dict[str, str] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)  # share of first tokens
    seconds: dict[int, dict[str, list[float]]] = field(default_factory=dict)  # clients -> side
    http: dict[int, list[float]] = field(default_factory=dict)  # clients -> share of our CPU time
    runs: int = 0
    strangers: float = 0.0  # most of a core that others took while a side was timed
    disturbed: int = 0  # rounds of a case that were run again, because others computed

    @classmethod
    def kept(cls, result: Mapping[str, Any]) -> Measured:
        """What `result` made, read back."""
        seconds = {case["clients"]: case["seconds"] for case in result["cases"]}
        http = {case["clients"]: case["http_share"] for case in result["cases"]}
        names = ("threads", "output", "runs_on", "agreement", "runs", "strangers", "disturbed")
        return cls(seconds=seconds, http=http, **{name: result[name] for name in names})


class PeerSide:
    """A peer's process, asked through the protocol.

    Args:
        worker: its model is loaded.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def pid(self) -> int:
        """See `Side`."""
        return self._worker.pid

    def complete(self, prompts: Prompts, output: int) -> tuple[float, list[Any]]:
        """See `Side`.

        Raises:
            WorkerError: an answer has another length.
        """
        answer = self._worker.ask("complete", prompts=prompts, output=output)
        if any(len(tokens) != output for tokens in answer["tokens"]):
            raise WorkerError(f"{self._worker.name} did not answer with {output} tokens each")
        return float(answer["seconds"]), [tokens[0] for tokens in answer["tokens"]]


def peers(python: Path, files: Mapping[str, Path]) -> dict[str, SideProcess]:
    """The peers' processes, ready to be started."""
    modules = {LLAMA_CPP: "llama_serving_worker", OPENVINO: "genai_worker"}
    return {
        name: SideProcess(
            (str(python), "-m", f"bench.peers.{module}"),
            str(files[name]),
            weights=files[name].parent,
        )
        for name, module in modules.items()
    }


def measure(
    model: BenchModel,
    processes: Mapping[str, SideProcess],
    plan: Plan,
    *,
    threads: int,
    vocab: int,
    progress: Progress,
    earlier: Measured | None = None,
) -> Measured:
    """Time every number of clients on every side.

    Args:
        model: ours.
        processes: the peers'.
        plan: how much.
        threads: of each side.
        vocab: token ids are below.
        progress: told what takes time.
        earlier: rounds of another run, to which these are added.

    Raises:
        WorkerError, ServerError: a side died or does something else than was asked for, or the
            machine is never ours alone.
    """
    measured = earlier or Measured(threads, plan.output)
    if (measured.threads, measured.output) != (threads, plan.output):
        raise WorkerError("what was measured before had other threads or outputs")
    progress("starting all sides")
    evict(model.settings.cache_dir)
    from_disk(processes.values())
    with _started(model, processes, plan, threads, measured) as sides:
        spelled = Tokenizer.load(Path(model.settings.target)).spelling
        _agree(sides, measured, vocab, lambda token: spelled(token)[0])
        for number in range(plan.rounds):
            for clients in plan.clients:
                prompts = _prompts(clients, vocab, seed=1000 * measured.runs + 10 * number)
                found = _round(sides, prompts, plan.output, number + measured.runs, measured)
                for name, seconds in found.items():
                    case = measured.seconds.setdefault(clients, {})
                    case.setdefault(name, []).append(seconds)
                rates = ", ".join(
                    f"{name} {clients * plan.output / seconds:.1f}"
                    for name, seconds in found.items()
                )
                progress(f"round {number + 1} of {plan.rounds}, {clients} clients: {rates} tok/s")
    measured.runs += 1
    return measured


@contextlib.contextmanager
def _started(
    model: BenchModel,
    processes: Mapping[str, SideProcess],
    plan: Plan,
    threads: int,
    measured: Measured,
) -> Iterator[dict[str, Side]]:
    rows = max(*plan.clients, _AGREEMENT_PROMPTS)
    settings = replace(
        model.settings,
        slots=rows,
        context=_CAPACITY,
        kv_tokens=rows * _CAPACITY,
        threads=threads,
    )
    with contextlib.ExitStack() as stack:
        pid, client = stack.enter_context(serving(settings))
        sides: dict[str, Side] = {OURS: stack.enter_context(HttpSide(pid, client, rows))}
        measured.runs_on[OURS] = f"specops serve, {sys.version.split()[0]}"
        for name, process in processes.items():
            worker = stack.enter_context(Worker(name, process.command, process.environment))
            answer = worker.ask(
                "load", model=process.model, threads=threads, rows=rows, capacity=_CAPACITY
            )
            measured.runs_on[name] = answer["runs_on"]
            sides[name] = PeerSide(worker)
        yield sides


def _prompts(count: int, vocab: int, seed: int) -> Prompts:
    """Random tokens: nobody's prompt begins like another's."""
    drawn: Prompts = (
        np.random.default_rng(seed + count).integers(1, vocab, (count, PROMPT)).tolist()
    )
    return drawn


def _agree(sides: Mapping[str, Side], measured: Measured, vocab: int, spelled: Any) -> None:
    """Warm all sides up, and see that they go on from a prompt alike.

    Weights are rounded differently, and the likeliest of a random model's tokens are close
    together, so not always; but by chance it would be one in thousands.
    """
    prompts = _prompts(_AGREEMENT_PROMPTS, vocab, seed=1)
    firsts = {name: side.complete(prompts, 1)[1] for name, side in sides.items()}
    for name in sides.keys() - {OURS}:
        alike = sum(
            spelled(token) in likeliest
            for likeliest, token in zip(firsts[OURS], firsts[name], strict=True)
        )
        measured.agreement[name] = share = alike / len(prompts)
        if share < _AGREEMENT:
            raise WorkerError(f"{name} computes something else: {share:.0%} of first tokens agree")


def _round(
    sides: Mapping[str, Side], prompts: Prompts, output: int, number: int, measured: Measured
) -> dict[str, float]:
    """Let every side answer the same prompts, again where somebody else computed meanwhile."""
    for _ in range(_ATTEMPTS):
        found: dict[str, float] = {}
        strangers = 0.0
        everyone = [os.getpid(), *(side.pid for side in sides.values())]
        for name in rotated(list(sides), number):
            settle(*everyone)
            side = sides[name]
            before, machine = sum(map(cpu_seconds, everyone)), machine_seconds()
            spent, loop = cpu_seconds(side.pid), main_thread_seconds(side.pid)
            start = time.monotonic()
            found[name], _ = side.complete(prompts, output)
            passed = time.monotonic() - start
            ours = sum(map(cpu_seconds, everyone)) - before
            others = machine_seconds() - machine - ours - _UNSURE_SECONDS
            strangers = max(strangers, others / passed)
            if name == OURS:
                loop = main_thread_seconds(side.pid) - loop
                share = loop / (cpu_seconds(side.pid) - spent)
        if strangers <= _STRANGERS:
            measured.http.setdefault(len(prompts), []).append(share)
            measured.strangers = max(measured.strangers, strangers)
            return found
        measured.disturbed += 1
    raise WorkerError(f"others compute on this machine: {strangers:.0%} of a core, again and again")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Our throughput over that of `rival`, the faster peer."""

    rival: str
    ratio: Summary
    wanted: float
    met: bool


def verdict(clients: int, seconds: Mapping[str, Sequence[float]]) -> Verdict:
    """Hold our rounds against those of the faster peer."""
    others = [name for name in seconds if name != OURS]
    rival = min(others, key=lambda peer: Summary.of(seconds[peer]).median)
    ratio = Summary.of(ratios(seconds[rival], seconds[OURS]))
    wanted = _WANTED.get(clients, 1.5)
    return Verdict(rival, ratio, wanted, ratio.median >= wanted)


def _rates(clients: int, output: int, seconds: Sequence[float]) -> Summary:
    return Summary.of([clients * output / value for value in seconds])


def table(title: str, measured: Measured) -> Table:
    """A row per number of clients: tokens per second of every side, ours over the better peer's."""
    names = list(measured.runs_on)
    rows = []
    for clients, seconds in measured.seconds.items():
        found = verdict(clients, seconds)
        rates = (_rates(clients, measured.output, seconds[name]) for name in names)
        rows.append(
            (
                str(clients),
                *(spread(rate, 1) for rate in rates),
                spread(found.ratio),
                found.rival,
                f"{found.wanted:.1f}",
                yes(found.met),
            )
        )
    columns = (
        "clients",
        *(f"{name}, tok/s" for name in names),
        "ratio",
        "against",
        "wanted",
        "met",
    )
    return Table(f"Requests at once, against its peers: {title}", columns, rows, _notes(measured))


def _notes(measured: Measured) -> tuple[str, ...]:
    agreeing = ", ".join(f"{name} {share:.0%}" for name, share in measured.agreement.items())
    rounds = len(next(iter(measured.seconds.values()))[OURS])
    shares = ", ".join(
        f"{Summary.of(shares).median:.1%} with {clients}"
        for clients, shares in measured.http.items()
    )
    return (
        f"prompts of {PROMPT} tokens, outputs of {measured.output}, all sent at once; tok/s: "
        "generated tokens of all clients over the time from the first sending to the last token, "
        "prompts' passes included; ratio: over the faster peer, round by round with quartiles",
        f"{OURS}: over HTTP, streaming, plain decoding; the peers are called directly, "
        f"{LLAMA_CPP} with all prompts in one batch, {OPENVINO} through its continuous batching",
        versions(measured.runs_on, measured.threads),
        f"of {OURS}'s processor time its event loop took {shares} clients: all of HTTP",
        f"{measured.runs} starts, {rounds} interleaved rounds; share of prompts that are gone on "
        f"from with one of the five tokens that {OURS} finds likeliest: {agreeing}; others took at "
        f"most {measured.strangers:.0%} of a core, {measured.disturbed} rounds were run again "
        "because they took more",
    )


def result(measured: Measured) -> dict[str, Any]:
    """All of it, fit for JSON; `Measured.kept` reads it back."""
    cases = []
    for clients, seconds in measured.seconds.items():
        rates = {
            name: asdict(_rates(clients, measured.output, values))
            for name, values in seconds.items()
        }
        cases.append(
            {
                "clients": clients,
                "seconds": seconds,
                "http_share": measured.http[clients],
                "tokens_per_second": rates,
                **asdict(verdict(clients, seconds)),
            }
        )
    return {
        "prompt": PROMPT,
        **{
            name: value
            for name, value in asdict(measured).items()
            if name not in ("seconds", "http")
        },
        "cases": cases,
    }
