"""Whole requests that all arrive at once: our service over HTTP beside the peers' own batching.

A case is a number of clients. Each sends a prompt and waits for its answer; the time runs from
the first one's sending to the last one's last token, prompts included. Ours is the real service in
a process of its own, asked over connections that stream; the peers are called directly, which
spares them HTTP and text. Sides take turns round by round as in `compare`, with the same prompts.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.memory.page_cache import evict
from bench.models import BenchModel, Progress
from bench.peers import compare
from bench.peers.compare import OURS, SideProcess
from bench.peers.models import LLAMA_CPP, OPENVINO
from bench.serving.clients import HttpSide
from bench.serving.server import serving
from bench.tools.quiet import Turns, cpu_seconds, main_thread_seconds
from bench.tools.report import Outcome, Table, Wanted, spread
from bench.tools.stats import Summary
from bench.tools.worker import Worker, WorkerError
from specops.text.tokenizer import Tokenizer

PROMPT, OUTPUT = 200, 64  # tokens of a request
_CAPACITY = 512  # tokens per row
_WANTED = {1: 1.6, 2: 1.7, 4: 1.6, 8: 1.5}  # of the faster peer's throughput, by clients
_AGREEMENT = 0.1  # least share of prompts that a peer goes on from with one of our five likeliest
_AGREEMENT_PROMPTS = 8

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of every number of clients after each of `starts`."""

    starts: int
    rounds: int
    clients: tuple[int, ...] = (1, 2, 4, 8)
    output: int = OUTPUT


FULL = Plan(starts=2, rounds=3)
QUICK = Plan(starts=1, rounds=1, clients=(1, 2), output=8)


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that arrive at once."""

    clients: int
    vocab: int
    seldom: bool = False

    @property
    def title(self) -> str:
        """How many."""
        return str(self.clients)


@dataclass(slots=True)
class Measured(compare.Measured):
    """All rounds in the order in which they ran; `agreement` is the share of first tokens."""

    plan: Plan
    http: dict[str, list[float]] = field(default_factory=dict)  # clients -> share of our CPU time
    asked: Counter[tuple[str, int]] = field(default_factory=Counter)  # clients, process

    def ask(self, case: Case, side: Side) -> list[float]:
        """Seconds of the answers; of our process, notes the event loop's share of its time."""
        self.asked[case.title, side.pid] += 1  # every round has new prompts, for all sides
        prompts = _prompts(case.clients, case.vocab, 1000 + 10 * self.asked[case.title, side.pid])
        loop, whole = main_thread_seconds(side.pid), cpu_seconds(side.pid)
        seconds, _ = side.complete(prompts, self.plan.output)
        if isinstance(side, HttpSide):
            share = (main_thread_seconds(side.pid) - loop) / (cpu_seconds(side.pid) - whole)
            self.http.setdefault(case.title, []).append(share)
        return [seconds]


class PeerSide:
    """A peer's process, whose model is loaded, asked through the protocol."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self.pid = worker, worker.pid

    def complete(self, prompts: Prompts, output: int) -> tuple[float, list[Any]]:
        """See `HttpSide`, but for what each answer begins with: its first token."""
        answer = self._worker.ask("complete", prompts=prompts, output=output)
        if any(len(tokens) != output for tokens in answer["tokens"]):
            raise WorkerError(f"{self._worker.name} did not answer with {output} tokens each")
        return float(answer["seconds"]), [tokens[0] for tokens in answer["tokens"]]


Side = HttpSide | PeerSide


def peers(python: Path, files: Mapping[str, Path]) -> dict[str, SideProcess]:
    """The peers' processes, ready to be started."""
    modules = {LLAMA_CPP: "llama_worker", OPENVINO: "genai_worker"}
    return {name: compare.peer(python, module, files[name]) for name, module in modules.items()}


def measure(
    model: BenchModel, processes: Mapping[str, SideProcess], plan: Plan, *, threads: int,
    vocab: int, progress: Progress, turns: Turns | None = None,
) -> Measured:  # fmt: skip
    """Time every number of clients on every side."""
    measured = Measured(plan, threads, turns=turns or Turns())
    spelled = Tokenizer.load(Path(model.settings.target)).spelling
    cases = [Case(clients, vocab) for clients in plan.clients]
    for start in range(plan.starts):
        progress(f"starting all sides, {start + 1} of {plan.starts}")
        evict(model.settings.cache_dir)
        compare.from_disk(processes.values())
        with _started(model, processes, plan, measured) as sides:
            _agree(sides, measured, vocab, lambda token: spelled(token)[0])
            measured.turns.measure(sides, cases, plan.rounds, measured.ask, measured.ms)
    return measured


@contextlib.contextmanager
def _started(
    model: BenchModel, processes: Mapping[str, SideProcess], plan: Plan, measured: Measured
) -> Iterator[dict[str, Side]]:
    rows = max(*plan.clients, _AGREEMENT_PROMPTS)
    sizes = {"context": _CAPACITY, "kv_tokens": rows * _CAPACITY}
    settings = replace(model.settings, slots=rows, threads=measured.threads, **sizes)
    with contextlib.ExitStack() as stack:
        pid, client = stack.enter_context(serving(settings))
        sides: dict[str, Side] = {OURS: stack.enter_context(HttpSide(pid, client, rows))}
        measured.runs_on[OURS] = f"specops serve, {sys.version.split()[0]}"
        for name, process in processes.items():
            opened = compare.loaded(name, process, measured.threads, rows, _CAPACITY)
            worker, measured.runs_on[name] = stack.enter_context(opened)
            sides[name] = PeerSide(worker)
        yield sides


def _prompts(count: int, vocab: int, seed: int) -> Prompts:
    """Random tokens: no prompt begins like another."""
    rng = np.random.default_rng(seed + count)
    return rng.integers(1, vocab, (count, PROMPT)).tolist()  # type: ignore[no-any-return]


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


def outcome(title: str, measured: Measured) -> Outcome:
    """A row per number of clients: tokens per second of every side, ours over the better peer's."""
    names, output = list(measured.runs_on), measured.plan.output
    rows, cases, wanted = [], [], []
    for clients, ms in measured.ms.items():
        rival, ratio = compare.fastest(ms, [name for name in ms if name != OURS])
        tokens = 1000 * int(clients) * output
        rates = {name: Summary.of([tokens / took for took in ms[name]]) for name in names}
        rows.append((clients, *(spread(rate, 1) for rate in rates.values()), spread(ratio), rival))
        told = {name: asdict(rate) for name, rate in rates.items()}
        case = {"clients": clients, "milliseconds": ms, "http_share": measured.http[clients]}
        case |= {"tokens_per_second": told, "rival": rival, "ratio": asdict(ratio)}
        cases.append(case)
        what = f"{clients} clients: times the tokens of {rival}"
        wanted.append(Wanted(what, _WANTED.get(int(clients), 1.5), ratio.median))
    columns = ("clients", *(f"{name}, tok/s" for name in names), "ratio", "against")
    title = f"Requests at once, against its peers: {title}"
    result = {"prompt": PROMPT, "threads": measured.threads, "plan": asdict(measured.plan)}
    result |= {"runs_on": measured.runs_on, "agreement": measured.agreement, "cases": cases}
    result |= {"turns": asdict(measured.turns)}
    return Outcome(result, [Table(title, columns, rows, _notes(measured))], wanted=wanted)


def _notes(measured: Measured) -> tuple[str, ...]:
    plan = measured.plan
    agreeing = ", ".join(f"{name} {share:.0%}" for name, share in measured.agreement.items())
    http = measured.http.items()
    shares = ", ".join(f"{Summary.of(found).median:.1%} with {clients}" for clients, found in http)
    return (
        f"prompts of {PROMPT} tokens, outputs of {plan.output}, all sent at once; tok/s: "
        "generated tokens of all clients over the time from the first sending to the last token, "
        "prompts' passes included; ratio: over the faster peer, round by round with quartiles",
        f"{OURS}: over HTTP, streaming, plain decoding; the peers are called directly, "
        f"{LLAMA_CPP} with all prompts in one batch, {OPENVINO} through its continuous batching",
        compare.versions(measured.runs_on, measured.threads),
        f"of {OURS}'s processor time its event loop took {shares} clients: all of HTTP",
        f"{plan.starts} starts, {plan.rounds} rounds; share of prompts that are gone on from with "
        f"one of the five tokens that {OURS} finds likeliest: {agreeing}; {measured.turns.told}",
    )
