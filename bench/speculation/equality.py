"""Is output always that of plain decoding alone? Every drafter and length, in every circumstance.

Each prompt is decoded once plainly and alone, in this process. Then every drafter with every draft
length answers it in other processes, among others: so many requests at once that arrive and leave
at random, with passes of random width, with and without the prefix cache, with a KV cache so small
that requests give their blocks up, with one thread and with two, with every kernel that this
processor runs. All tokens must be equal, and all log-probabilities to the bit.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.models import BenchModel
from bench.prompts import Prompt
from bench.speculation.equality_worker import run as run_together
from bench.speculation.ways import PLAIN, Config, Runner
from bench.tools.report import Outcome, Table, progress, yes
from bench.tools.worker import Worker
from specops.config import Settings
from specops.runtime import kernels
from specops.runtime.kernels import BLOCK_TOKENS

_SLOWEST = kernels.NAMES[-1]
_PASS_TOKENS = (16, 17, 24, 33, 48, 64, 96, 130, 256)
_PREFIX_CACHES = ("off", "client", "all")
_CLIENTS = ("", "one", "other")
_LEAVES = 0.1  # of the requests: their client leaves before the end
_TIGHT_REQUESTS = 2  # of the longest: the tokens of a KV cache that forces preemption
_SLOW_WAYS = 4  # the slowest kernels take every fourth way
_PATIENCE = 3600.0  # seconds that a process's answer may take


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is compared."""

    prompts: int  # each is answered in every way
    new_tokens: int
    chunk: int = 10  # prompts per process
    slow_every: int = 10  # of so many chunks the slowest kernels answer one, too:
    slow_prompts: int = 2  # so many of its prompts
    loads: tuple[int, ...] = (1, 4, 8, 16)  # requests at once, drawn for every group; with 1


FULL = Plan(prompts=500, new_tokens=128)
QUICK = Plan(prompts=2, new_tokens=16, chunk=2, slow_prompts=1)


@dataclass(frozen=True, slots=True)
class Case:
    """One process: which prompts it answers, and in what circumstances."""

    number: int
    first: int  # of the prompts
    count: int
    kernel: str
    threads: int
    prefix_cache: str
    pass_tokens: int
    tight: bool  # the KV cache holds a few requests only

    @property
    def places(self) -> range:
        """Of its prompts."""
        return range(self.first, self.first + self.count)

    @property
    def rng(self) -> random.Random:
        """Of this case's arrivals, departures and groups; the same every time."""
        return random.Random(f"equality {self.number}")


@dataclass(slots=True)
class Count:
    """What was compared of one kind; `first_differences` are places of tokens, an answer each."""

    requests: int = 0
    tokens: int = 0
    logprobs_differ: int = 0  # answers with the same tokens, but another log-probability
    first_differences: list[int] = field(default_factory=list)

    @property
    def differing(self) -> int:
        """Answers that are not to the bit what plain decoding alone brings."""
        return len(self.first_differences) + self.logprobs_differ

    def take(self, got: Sequence[Any], expected: Sequence[Any]) -> None:
        """Compare an answer, which may have been cut off, with plain decoding's."""
        self.requests += 1
        self.tokens += len(got)
        if list(got) == list(expected[: len(got)]):
            return
        differing = [token[0] != other[0] for token, other in zip(got, expected, strict=False)]
        differing += [True] * (len(got) > len(expected))
        if True in differing:
            self.first_differences.append(differing.index(True))
        else:
            self.logprobs_differ += 1


Counts = dict[str, dict[str, Count]]  # by what tells requests apart, and by its value


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan) -> Outcome:
    """Compare all processes' answers."""
    settings = replace(model.settings, slots=max(plan.loads))
    runner = Runner.load(replace(model, settings=settings))
    comparison = Comparison(runner, settings, prompts[: plan.prompts], plan)
    cases = list(circumstances(len(comparison.prompts), plan, runner.engine.info.threads))
    counts: Counts = {}
    for number, case in enumerate(cases, 1):
        comparison.compare(case, counts)
        progress(f"{number} of {len(cases)} processes, {case.kernel}, {case.threads} threads")
    return outcome(model, counts, plan, len(comparison.prompts))


def circumstances(prompts: int, plan: Plan, threads: int) -> Iterator[Case]:
    """All processes, in order. What one of them runs with is drawn, the same in every run."""
    runnable = kernels.NAMES[kernels.NAMES.index(kernels.kernel()) :]
    fast = runnable[:-1] or runnable
    number = 0
    for chunk, first in enumerate(range(0, prompts, plan.chunk)):
        count = min(plan.chunk, prompts - first)
        slow = len(runnable) > 1 and chunk % plan.slow_every == 0
        for kernel, most in ((None, count), (_SLOWEST, min(count, plan.slow_prompts))):
            if kernel and not slow:
                continue
            rng = random.Random(f"circumstances {number}")
            runs_with = (kernel or rng.choice(fast), rng.choice(sorted({1, max(2, threads)})))
            caching = (rng.choice(_PREFIX_CACHES), rng.choice(_PASS_TOKENS), rng.random() < 0.5)
            yield Case(number, first, most, *runs_with, *caching)
            number += 1


class Comparison:
    """Has processes answer prompts in all ways, and counts; `runner` decodes plainly and alone."""

    def __init__(
        self, runner: Runner, settings: Settings, prompts: Sequence[Prompt], plan: Plan
    ) -> None:
        self.ways = [PLAIN, *runner.ways(*range(1, settings.max_k_draft + 1))]
        self._engine = runner.engine
        self._settings, self.prompts, self._plan = settings, prompts, plan
        self._expected: dict[int, list[Any]] = {}  # plain decoding's answers by prompt

    def compare(self, case: Case, counts: Counts) -> None:
        """Compare one process's answers."""
        rng, plan = case.rng, self._plan
        asked = [(place, way) for place in case.places for way in self._ways(case)]
        rng.shuffle(asked)
        command = (sys.executable, "-m", "bench.speculation.equality_worker")
        with Worker(f"equality {case.number}", command, patience=_PATIENCE) as worker:
            loaded = worker.ask("load", kernel=case.kernel, settings=self._told(case))
            if (loaded["kernels"], loaded["threads"]) != (case.kernel, case.threads):
                raise RuntimeError(f"the process runs with {loaded}, which is not {case}")
            while asked:
                load = rng.choice([load for load in plan.loads if load <= len(asked)])
                group, asked = asked[:load], asked[load:]
                requests = [
                    self._fields(place, way)
                    | {"client": rng.choice(_CLIENTS), "arrives": rng.randrange(3 * load)}
                    | {"leaves": _leaves(rng, plan.new_tokens)}
                    for place, way in group
                ]
                answers = worker.ask("run", requests=requests)["answers"]
                for (place, way), request, answer in zip(group, requests, answers, strict=True):
                    expected = self._alone(place)
                    if request["leaves"] is None and len(answer["tokens"]) != len(expected):
                        raise RuntimeError(f"{len(answer['tokens'])} tokens came for {place}")
                    for kind, value in _kinds(case, way, load, request, answer).items():
                        count = counts.setdefault(kind, {}).setdefault(value, Count())
                        count.take(answer["tokens"], expected)

    def _ways(self, case: Case) -> Sequence[Config]:
        return self.ways[::_SLOW_WAYS] if case.kernel == _SLOWEST else self.ways

    def _alone(self, place: int) -> list[Any]:
        """Plain decoding's answer."""
        if place not in self._expected:
            (answer,) = run_together(self._engine, [self._fields(place, PLAIN)])
            self._expected[place] = answer["tokens"]
        return self._expected[place]

    def _fields(self, place: int, way: Config) -> dict[str, Any]:
        """A request that arrives at once and stays, see `equality_worker.run`."""
        prompt = self.prompts[place]
        asked = {"prompt_tokens": list(self._engine.encode(prompt.text))}
        asked |= {"arrives": 0, "leaves": None, "max_new_tokens": self._plan.new_tokens}
        asked |= {"sampling": asdict(prompt.sampling)}
        return asked | {"drafter": way.drafter, "k_draft": way.k, "adaptive": way.adaptive}

    def _told(self, case: Case) -> dict[str, Any]:
        """A process's settings."""
        chosen = {"threads": case.threads, "prefix_cache": case.prefix_cache}
        told = replace(self._settings, max_batched_tokens=case.pass_tokens, **chosen)
        if case.tight:
            prompts = (self._engine.encode(self.prompts[place].text) for place in case.places)
            longest = max(map(len, prompts)) + self._plan.new_tokens + told.max_k_draft + 1
            tokens = _TIGHT_REQUESTS * -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
            told = replace(told, kv_tokens=tokens, context=tokens)
        return asdict(told)


def _leaves(rng: random.Random, new_tokens: int) -> int | None:
    """After how many tokens a request's client is gone, if at all."""
    return rng.randrange(1, new_tokens) if rng.random() < _LEAVES else None


def _kinds(
    case: Case, way: Config, load: int, request: dict[str, Any], answer: dict[str, Any]
) -> dict[str, str]:
    """What a request is counted under."""
    return {
        "all": "",
        "way": way.label,
        "requests at once": str(load),
        "kernels": case.kernel,
        "threads": str(case.threads),
        "prefix cache": case.prefix_cache,
        "most tokens of a pass": str(case.pass_tokens),
        "client left": "no" if request["leaves"] is None else "yes",
        "preempted": "yes" if answer["preemptions"] else "no",
    }


def outcome(model: BenchModel, counts: Counts, plan: Plan, prompts: int) -> Outcome:
    """The table; everything must be equal."""
    sound = not any(count.differing for found in counts.values() for count in found.values())
    rows = []
    for kind, found in counts.items():
        for value, count in sorted(found.items(), key=lambda item: _order(item[0])):
            compared = (f"{count.requests:,}", f"{count.tokens:,}")
            other = (str(len(count.first_differences)), str(count.logprobs_differ))
            rows.append((f"{kind}: {value}" if value else kind, *compared, *other))
    table = Table(
        f"Equality with plain decoding alone: {model.title}",
        ("requests", "compared", "tokens", "other tokens", "other log-probabilities"),
        rows,
        (
            f"{prompts} held-out prompts, {plan.new_tokens} new tokens each, greedy; each "
            "answer compared token by token, with its log-probabilities to the bit, with that of "
            "plain decoding alone; an answer is counted under each of its circumstances",
            "groups of requests arrive at random steps; clients leave after a random token, and "
            f"what came until then is compared; {_SLOWEST} answers a part of the prompts and ways",
            f"output always that of plain decoding alone: {yes(sound)}",
        ),
    )
    told = {kind: {value: asdict(count) for value, count in found.items()}
            for kind, found in counts.items()}  # fmt: skip
    result = {"model": model.key, "prompts": prompts, "new_tokens": plan.new_tokens}
    return Outcome(result | {"lossless": sound, "counts": told}, [table], sound=sound)


def _order(value: str) -> tuple[int, str]:
    """Numbers by size, then words."""
    return (int(value), "") if value.isdigit() else (sys.maxsize, value)
