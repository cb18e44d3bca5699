"""Whole requests that all arrive at once: our service over HTTP, the peers with their own batching.

A case is a number of clients. Each sends a prompt and waits for its answer. The time runs from the
first sending to the last token of the last answer, prompts included. Ours is the real service in a
process of its own, asked over connections that stream. The peers are called directly, which spares
them HTTP and text. Sides take turns round by round as in `compare`, with the same prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.memory.page_cache import evict
from bench.models import TINYLLAMA_VOCAB, BenchModel, tinyllama
from bench.peers import compare
from bench.peers.compare import OURS, THREADS, SideProcess
from bench.peers.environment import install
from bench.peers.models import LLAMA_CPP, OPENVINO
from bench.serving.load import Answer, Ask, burst, once, span
from bench.serving.server import Server, ServerError, environment, serving
from bench.tools.quiet import Case, Turns, cpu_seconds, main_thread_seconds
from bench.tools.report import Outcome, Summary, Table, Target, progress
from bench.tools.worker import Worker, WorkerError
from specops.text.tokenizer import Tokenizer

PROMPT, OUTPUT = 200, 64  # tokens of a request
_CAPACITY = 512  # tokens per row
_TARGET = {1: 1.6, 2: 1.7, 4: 1.6, 8: 1.5}  # of the faster peer's throughput, by clients
_LIKELIEST = 5  # first tokens of an answer: the API tells no more
_AGREEMENT = 0.1  # least share of prompts for which a peer's first token is one of these
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


class HttpSide:
    """Our service over HTTP, whose answers stream.

    It decodes plainly: other benchmarks measure speculation, and a random model repeats itself more
    than any real one.
    """

    def __init__(self, server: Server) -> None:
        self.pid, self._port = server.pid, server.port
        models = asyncio.run(once(self._port, Ask("/v1/models")))
        self._model = json.loads(models.body)["data"][0]["id"]

    def complete(self, prompts: Prompts, output: int) -> tuple[float, list[list[str]]]:
        """Send all prompts at once, for `output` tokens each.

        Returns:
            Seconds from the first sending to the end of the last answer, and for each prompt the
            texts of the most likely first tokens. They are empty if `output` is more than one,
            because probabilities take time.
        """
        asks = [self._ask(prompt, output) for prompt in prompts]
        answers = asyncio.run(burst(self._port, asks))
        return span(answers), [_likeliest(answer, output) for answer in answers]

    def _ask(self, prompt: Sequence[int], output: int) -> Ask:
        body = {"model": self._model, "prompt": prompt, "max_tokens": output, "temperature": 0}
        body |= {"ignore_eos": True, "drafter": "none", "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        body |= {"logprobs": _LIKELIEST if output == 1 else None}
        return Ask("/v1/completions", body)


def _likeliest(answer: Answer, output: int) -> list[str]:
    """The most likely first tokens of a whole answer, where they were asked for."""
    if not answer.complete:
        raise ServerError(f"{answer.status} {answer.problem} {answer.body[-200:]!r}")
    first, *_, last = answer.events
    if (got := last["usage"]["completion_tokens"]) != output:
        raise ServerError(f"{got} tokens came, not {output}")
    logprobs = first["choices"][0]["logprobs"]
    return list(logprobs["top_logprobs"][0]) if logprobs else []


class PeerSide:
    """A peer's process with its model."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self.pid = worker, worker.pid

    def complete(self, prompts: Prompts, output: int) -> tuple[float, list[int]]:
        """Send all prompts at once; returns seconds, and each answer's first token."""
        seconds, answers = self._worker.ask("complete", prompts=prompts, output=output)
        if any(len(tokens) != output for tokens in answers):
            raise WorkerError(f"{self._worker.name} did not answer with {output} tokens each")
        return seconds, [tokens[0] for tokens in answers]


Side = HttpSide | PeerSide


@dataclass(slots=True)
class Measured(compare.Measured):
    """What was measured; `agreement` is the share of first tokens."""

    plan: Plan
    # By number of clients: the event loop's share of our process's CPU time.
    http: dict[str, list[float]] = field(default_factory=dict)
    _asked: Counter[tuple[int, int]] = field(default_factory=Counter)  # by clients and process

    def ask(self, clients: int, vocab: int, side: Side) -> list[float]:
        """Seconds of the answers. Every round has new prompts, the same for all sides."""
        self._asked[clients, side.pid] += 1
        prompts = _prompts(clients, vocab, 1000 + 10 * self._asked[clients, side.pid])
        loop, whole = main_thread_seconds(side.pid), cpu_seconds(side.pid)
        seconds, _ = side.complete(prompts, self.plan.output)
        if isinstance(side, HttpSide):
            share = (main_thread_seconds(side.pid) - loop) / (cpu_seconds(side.pid) - whole)
            self.http.setdefault(str(clients), []).append(share)
        return [seconds]


def run(plan: Plan) -> Outcome:
    """Measure TinyLlama's shape on all sides."""
    others = compare.peers(install(), llama="llama_worker", openvino="genai_worker")
    model = tinyllama()
    return outcome(model.title, measure(model, others, plan, TINYLLAMA_VOCAB))


def measure(
    model: BenchModel,
    processes: Mapping[str, SideProcess],
    plan: Plan,
    vocab: int,
    turns: Turns | None = None,
) -> Measured:
    """Time every number of clients on every side."""
    measured = Measured(plan, turns or Turns())
    spelled = Tokenizer.load(Path(model.settings.target)).spelling
    cases = [
        Case(str(clients), lambda side, clients=clients: measured.ask(clients, vocab, side))
        for clients in plan.clients
    ]
    for start in range(plan.starts):
        progress(f"starting all sides, {start + 1} of {plan.starts}")
        evict(model.settings.cache_dir)
        compare.from_disk(processes.values())
        with _started(model, processes, measured) as sides:
            _agree(sides, measured, vocab, lambda token: spelled(token)[0])
            measured.turns.measure(sides, cases, plan.rounds)
    return measured


@contextlib.contextmanager
def _started(
    model: BenchModel, processes: Mapping[str, SideProcess], measured: Measured
) -> Iterator[dict[str, Side]]:
    rows = max(*measured.plan.clients, _AGREEMENT_PROMPTS)
    sizes = {"context": _CAPACITY, "kv_tokens": rows * _CAPACITY}
    settings = replace(model.settings, slots=rows, threads=THREADS, **sizes)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(environment(settings)))
        sides: dict[str, Side] = {OURS: HttpSide(server)}
        measured.runs_on[OURS] = f"specops serve, {sys.version.split()[0]}"
        for name, process in processes.items():
            opened = compare.loaded(name, process, rows, _CAPACITY)
            worker, measured.runs_on[name] = stack.enter_context(opened)
            sides[name] = PeerSide(worker)
        yield sides


def _prompts(count: int, vocab: int, seed: int) -> Prompts:
    """Random tokens: no prompt begins like another."""
    rng = np.random.default_rng(seed + count)
    return rng.integers(1, vocab, (count, PROMPT)).tolist()  # type: ignore[no-any-return]


def _agree(
    sides: Mapping[str, Side], measured: Measured, vocab: int, spelled: Callable[[int], str]
) -> None:
    """Warm all sides up, and check that they continue prompts alike.

    Their weights are rounded differently, and the most likely tokens of a random model have nearly
    the same probability, so they do not always agree; but by chance it would be one in thousands.
    """
    prompts = _prompts(_AGREEMENT_PROMPTS, vocab, seed=1)
    firsts: dict[str, Any] = {name: side.complete(prompts, 1)[1] for name, side in sides.items()}
    for name in sides.keys() - {OURS}:
        pairs = zip(firsts[OURS], firsts[name], strict=True)
        alike = sum(spelled(token) in likeliest for likeliest, token in pairs)
        measured.agreement[name] = share = alike / len(prompts)
        if share < _AGREEMENT:
            raise WorkerError(f"{name} computes something else: {share:.0%} of first tokens agree")


def outcome(title: str, measured: Measured) -> Outcome:
    """A row per number of clients: tokens per second of every side, and ours over the best peer."""
    names, plan, turns = list(measured.runs_on), measured.plan, measured.turns
    rows, cases, targets = [], [], []
    for clients, ms in turns.ms.items():
        rival, ratio = turns.rival(clients)
        tokens = 1000 * int(clients) * plan.output
        rates = {name: Summary.of([tokens / took for took in ms[name]]) for name in names}
        rows.append((clients, *(rate.spread(1) for rate in rates.values()), ratio.spread(), rival))
        spreads = {name: asdict(rate) for name, rate in rates.items()}
        case = {"clients": clients, "http_share": measured.http[clients], "rival": rival}
        cases.append(case | {"tokens_per_second": spreads, "ratio": asdict(ratio)})
        what = f"{clients} clients: times the tokens of {rival}"
        targets.append(Target(what, _TARGET.get(int(clients), 1.5), ratio.median))
    agreeing = ", ".join(f"{name} {share:.0%}" for name, share in measured.agreement.items())
    http = measured.http.items()
    shares = ", ".join(f"{Summary.of(found).median:.1%} with {clients}" for clients, found in http)
    notes = (
        f"prompts of {PROMPT} tokens, outputs of {plan.output}, all sent at once; tok/s: "
        "generated tokens of all clients over the time from the first sending to the last token, "
        "prompts' passes included; ratio: over the faster peer, round by round with quartiles",
        f"{OURS}: over HTTP, streaming, plain decoding; the peers are called directly, "
        f"{LLAMA_CPP} with all prompts in one batch, {OPENVINO} through its continuous batching",
        measured.versions,
        f"of {OURS}'s processor time its event loop took {shares} clients: all of HTTP",
        f"{plan.starts} starts, {plan.rounds} rounds; share of prompts that are continued with "
        f"one of {OURS}'s five most likely tokens: {agreeing}; {turns.note}",
    )
    columns = ("clients", *(f"{name}, tok/s" for name in names), "ratio", "against")
    table = Table(f"Requests at once, against its peers: {title}", columns, rows, notes)
    result = {"prompt": PROMPT, "threads": THREADS, "plan": asdict(plan)}
    result |= {"runs_on": measured.runs_on, "agreement": measured.agreement, "cases": cases}
    return Outcome(result | {"turns": asdict(turns)}, [table], targets=targets)
