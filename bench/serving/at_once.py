"""Times concurrent requests: our service over HTTP, the peers with their own batching.

A case is a number of clients. Each sends a prompt and waits for its answer. The time runs from the
first request to the last token of the last answer, prompts included. Ours is the real service in a
separate process, with streamed answers. The peers are called directly, which spares them HTTP and
text. Sides take turns round by round as in `compare`, with the same prompts.
"""

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.memory.cgroup import evict
from bench.models import TINYLLAMA_VOCAB, BenchModel
from bench.peers import compare
from bench.peers.compare import THREADS, SideProcess, Sides
from bench.peers.models import INT4, LLAMA_CPP, OPENVINO, OURS, lineups
from bench.serving.load import Answer, Ask, ServerError, burst, greedy, once, span
from bench.serving.server import Server, environment, serving
from bench.tools.quiet import Case, Turns
from bench.tools.report import Outcome, progress
from bench.tools.worker import Worker, WorkerError
from specops.text.tokenizer import Tokenizer

PROMPT, OUTPUT = 200, 64  # tokens of a request
_CAPACITY = 512  # tokens per row
# Minimum throughput relative to a peer, by weights and clients.
_TARGETS = {(INT4, "1", LLAMA_CPP): 1.6, (INT4, "4", OPENVINO): 1.6, (INT4, "8", OPENVINO): 1.5}
_LIKELIEST = 5  # the API's maximum number of likely tokens
_AGREEMENT = 0.1  # minimum share of prompts for which a peer's first token is one of these
_AGREEMENT_PROMPTS = 8

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of every number of clients, after each of `starts`."""

    starts: int
    rounds: int
    clients: tuple[int, ...] = (1, 4, 8)
    output: int = OUTPUT


FULL = Plan(starts=1, rounds=3)
QUICK = Plan(starts=1, rounds=1, clients=(2,), output=8)


class HttpSide:
    """Our service over HTTP, with streamed answers.

    It uses plain decoding: other benchmarks measure speculation, and a random model repeats itself
    more than any real one.
    """

    def __init__(self, server: Server) -> None:
        self.pid, self._port = server.pid, server.port
        models = asyncio.run(once(self._port, Ask("/v1/models")))
        self._model = json.loads(models.body)["data"][0]["id"]

    def ask(self, prompts: Prompts, output: int, **more: Any) -> list[Answer]:
        """Complete answers to concurrent prompts, of `output` tokens each."""
        asks = [greedy(self._model, prompt, output, **more) for prompt in prompts]
        return [answer.checked() for answer in asyncio.run(burst(self._port, asks))]

    def complete(self, prompts: Prompts, output: int) -> tuple[float, list[list[str]]]:
        """Send all prompts at once, for `output` tokens each.

        Returns:
            Seconds from the first request to the end of the last answer, and for each prompt the
            texts of the most likely first tokens, if `output` is 1: probabilities take time.
        """
        logprobs = _LIKELIEST if output == 1 else None
        answers = self.ask(prompts, output, drafter="none", logprobs=logprobs)
        return span(answers), [_likeliest(answer, output) for answer in answers]


def _likeliest(answer: Answer, output: int) -> list[str]:
    """The most likely first tokens of a complete answer, if it has them."""
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
        """Send all prompts at once; return seconds, and each answer's first token."""
        seconds, answers = self._worker.ask("complete", prompts=prompts, output=output)
        if any(len(tokens) != output for tokens in answers):
            raise WorkerError(f"{self._worker.name} did not answer with {output} tokens each")
        return seconds, [tokens[0] for tokens in answers]


Side = HttpSide | PeerSide


@dataclass(slots=True)
class Measured(compare.Measured):
    """The results; `agreement` is the share of first tokens that agree."""

    _asked: Counter[tuple[int, int]] = field(default_factory=Counter)  # by clients and process

    def ask(self, clients: int, vocab: int, side: Side) -> list[float]:
        """Seconds until all answers. Every round has new prompts, the same for all sides.

        Args:
            clients: number of requests.
            vocab: size of the vocabulary.
            side: the side to ask.
        """
        self._asked[clients, side.pid] += 1
        prompts = _prompts(clients, vocab, 1000 + 10 * self._asked[clients, side.pid])
        return [side.complete(prompts, self.plan.output)[0]]


def run(plan: Plan, cache: Path) -> Outcome:
    """Measure all kinds of weights on all sides."""
    python, entered = lineups(cache)
    processes: dict[str, SideProcess] = {}
    for lineup in entered:
        processes |= compare.peers(python, lineup, openvino="genai_worker")
    models = {lineup.sides[OURS]: lineup.model for lineup in entered}
    sides = {lineup.weights: lineup.sides for lineup in entered}
    return outcome(measure(models, processes, sides, plan, TINYLLAMA_VOCAB))


def measure(
    models: Mapping[str, BenchModel],
    processes: Mapping[str, SideProcess],
    sides: Mapping[str, Sides],
    plan: Plan,
    vocab: int,
    *,
    turns: Turns | None = None,
) -> Measured:
    """Time every number of clients on our servers and in the peers' processes.

    Args:
        models: our models, by name of the side.
        processes: the peers' processes, by name of the side.
        sides: the sides to compare with each other, by kind of weights.
        plan: how much to measure.
        vocab: size of the vocabulary.
        turns: collects the times; None: a new one.
    """
    measured = Measured(plan, sides, turns or Turns())
    cases = [
        Case(str(clients), lambda side, clients=clients: measured.ask(clients, vocab, side))
        for clients in plan.clients
    ]
    for start in range(plan.starts):
        progress(f"starting all sides, {start + 1} of {plan.starts}")
        for folder in {model.settings.cache_dir for model in models.values()}:
            evict(folder)
        compare.from_disk(processes.values())
        with _started(models, processes, measured) as running:
            _agree(running, models, measured, vocab)
            measured.turns.measure(running, cases, plan.rounds)
    return measured


@contextlib.contextmanager
def _started(
    models: Mapping[str, BenchModel], processes: Mapping[str, SideProcess], measured: Measured
) -> Iterator[dict[str, Side]]:
    rows = max(*measured.plan.clients, _AGREEMENT_PROMPTS)
    sizes = {"slots": rows, "context": _CAPACITY, "kv_tokens": rows * _CAPACITY}
    with contextlib.ExitStack() as stack:
        running: dict[str, Side] = {}
        for name, model in models.items():
            settings = replace(model.settings, threads=THREADS, **sizes)
            running[name] = HttpSide(stack.enter_context(serving(environment(settings))))
            measured.runs_on[name] = f"specops serve, {sys.version.split()[0]}"
        for name, process in processes.items():
            opened = compare.loaded(name, process, rows, _CAPACITY)
            worker, measured.runs_on[name] = stack.enter_context(opened)
            running[name] = PeerSide(worker)
        yield running


def _prompts(count: int, vocab: int, seed: int) -> Prompts:
    """Random tokens, so that no two prompts share a prefix."""
    rng = np.random.default_rng(seed + count)
    return rng.integers(1, vocab, (count, PROMPT)).tolist()  # type: ignore[no-any-return]


def _agree(
    running: Mapping[str, Side], models: Mapping[str, BenchModel], measured: Measured, vocab: int
) -> None:
    """Warm up all sides, and check that they continue prompts alike.

    Rounding decides between a random model's most likely tokens, so they do not always agree. By
    chance, only one in thousands would.
    """
    prompts = _prompts(_AGREEMENT_PROMPTS, vocab, seed=1)
    firsts: dict[str, Any] = {name: side.complete(prompts, 1)[1] for name, side in running.items()}
    for weights, compared in measured.sides.items():
        ours, *others = compared.values()
        spelled = Tokenizer.load(models[ours].folder().path).spelling
        for name in others:
            pairs = zip(firsts[ours], firsts[name], strict=True)
            alike = sum(spelled(token)[0] in likeliest for likeliest, token in pairs)
            measured.agreement[f"{weights} and {name}"] = share = alike / len(prompts)
            if share < _AGREEMENT:
                raise WorkerError(f"{name} computes something else: {share:.0%} of tokens agree")


def outcome(measured: Measured) -> Outcome:
    """A row per kind of weights and number of clients: tokens per second, and ours over theirs."""
    plan, turns = measured.plan, measured.turns
    notes = (
        f"prompts of {PROMPT} tokens, outputs of {plan.output}, all sent at once; tok/s: "
        "generated tokens of all clients over the time from the first request to the last token, "
        "prompts included",
        f"{OURS}: over HTTP, streaming, plain decoding; the peers are called directly, "
        f"{LLAMA_CPP} with all prompts in one batch, {OPENVINO} through its continuous batching",
        f"{plan.starts} starts, {plan.rounds} rounds; share of prompts that are continued with "
        f"one of {OURS}'s five most likely tokens: {measured.agreeing()}",
    )
    rates = {
        clients: lambda ms, clients=clients: 1000 * int(clients) * plan.output / ms
        for clients in turns.ms
    }
    title = "Requests at once, against its peers"
    table, record = measured.table(title, ("clients", "tok/s"), rates, notes)
    result = {"prompt": PROMPT, "threads": THREADS, "plan": asdict(plan), "cases": record}
    result |= {"runs_on": measured.runs_on, "agreement": measured.agreement}
    result |= {"turns": asdict(turns)}
    return Outcome(result, [table], targets=measured.targets(_TARGETS))
