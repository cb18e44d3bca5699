"""Does every drafter give the output of plain decoding alone, in all circumstances?

Each prompt is decoded once plainly and alone, in this process. Then every drafter with every draft
length answers it in other processes, together with other requests: these arrive and leave at
random, with passes of random width, with and without the prefix cache, with a KV cache so small
that requests are preempted, with one thread and with two, and with every kernel that this processor
runs. All tokens must be equal, and all log-probabilities equal to the bit. Small random models with
draft heads or with other kinds of layers, drafted by their own 4-bit copies, get fewer prompts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.models import LAYER_KINDS, BenchModel
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
_LEAVES = 0.1  # share of requests whose client leaves before the end
_TIGHT_REQUESTS = 2  # a KV cache for this many of the longest requests forces preemption
_SLOW_WAYS = 4  # the slowest kernels run every fourth way
_TITLE = "Equality with plain decoding alone"
_COLUMNS = ("compared", "tokens", "other tokens", "other log-probabilities")
_PATIENCE = 3600.0  # maximum seconds for a process's answer


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to compare."""

    prompts: int  # each is answered in every way
    kind_prompts: int  # how many of them models with other kinds of layers answer
    new_tokens: int
    chunk: int = 10  # prompts per process
    slow_every: int = 10  # the slowest kernels also answer one chunk in this many
    slow_prompts: int = 2  # but only this many of its prompts
    loads: tuple[int, ...] = (1, 4, 8, 16)  # requests at once, drawn for each group

    def prompts_of(self, model: BenchModel) -> int:
        """Number of prompts that a model answers."""
        return self.kind_prompts if model.key in LAYER_KINDS else self.prompts


FULL = Plan(prompts=500, kind_prompts=50, new_tokens=128)
QUICK = Plan(prompts=2, kind_prompts=1, new_tokens=16, chunk=2, slow_prompts=1)


@dataclass(frozen=True, slots=True)
class Case:
    """One process: its prompts and its circumstances."""

    number: int
    places: range  # indices of its prompts
    kernel: str
    threads: int
    prefix_cache: str
    pass_tokens: int
    tight: bool  # the KV cache holds only a few requests


@dataclass(slots=True)
class Count:
    """Compared answers of one kind."""

    requests: int = 0
    tokens: int = 0
    logprobs_differ: int = 0  # answers with equal tokens, but different log-probabilities
    first_differences: list[int] = field(default_factory=list)  # positions of differing tokens

    @property
    def differing(self) -> int:
        """Number of answers that are not bitwise equal to those of plain decoding alone."""
        return len(self.first_differences) + self.logprobs_differ

    def take(self, got: Sequence[Any], expected: Sequence[Any]) -> None:
        """Compare an answer, possibly cut off, with plain decoding's."""
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


Fields = dict[str, Any]  # of a request or of an answer
Counts = dict[str, dict[str, Count]]  # by circumstance and by its value


def run(models: Sequence[BenchModel], prompts: Sequence[Prompt], plan: Plan) -> Outcome:
    """Compare the answers of all processes, model by model."""
    found: dict[BenchModel, Counts] = {}
    for model in models:
        found[model] = _compared(model, prompts[: plan.prompts_of(model)], plan).counts
    return outcome(found, plan)


def _compared(model: BenchModel, prompts: Sequence[Prompt], plan: Plan) -> Comparison:
    settings = replace(model.settings, slots=max(plan.loads))
    runner = Runner.load(replace(model, settings=settings))
    comparison = Comparison(runner, settings, prompts, plan)
    cases = list(circumstances(len(prompts), plan, runner.engine.info.threads))
    for number, case in enumerate(cases, 1):
        comparison.compare(case)
        so_far = comparison.counts["all"][""]
        done = f"{number} of {len(cases)} processes, {case.kernel}, {case.threads} threads"
        progress(f"{model.title}: {done}: {so_far.differing} of {so_far.requests} answers differ")
    return comparison


def circumstances(prompts: int, plan: Plan, threads: int) -> Iterator[Case]:
    """All processes, in order. Their circumstances are random, but the same in every run.

    Args:
        prompts: number of prompts.
        plan: how much to compare.
        threads: the service's number of threads.
    """
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
            yield Case(number, range(first, first + most), *runs_with, *caching)
            number += 1


class Comparison:
    """Has processes answer prompts in all ways, and counts differences.

    Args:
        runner: decodes each prompt plainly and alone, in this process.
        settings: settings of the processes, apart from their circumstances.
        prompts: the prompts.
        plan: how much to compare.

    Attributes:
        ways: plain decoding, and every drafter with every draft length and adaptively.
        counts: by circumstance and by its value.
    """

    def __init__(
        self, runner: Runner, settings: Settings, prompts: Sequence[Prompt], plan: Plan
    ) -> None:
        self.ways = [PLAIN, *runner.ways(*range(1, settings.max_k_draft + 1))]
        self._engine = runner.engine
        self._settings, self.prompts, self._plan = settings, prompts, plan
        self.counts: Counts = {}
        self._expected: dict[int, list[Any]] = {}  # plain decoding's answers by prompt

    def compare(self, case: Case) -> None:
        """Compare the answers of one process."""
        rng, plan = random.Random(f"equality {case.number}"), self._plan
        ways = self.ways[::_SLOW_WAYS] if case.kernel == _SLOWEST else self.ways
        asked = [(place, way) for place in case.places for way in ways]
        rng.shuffle(asked)
        command = (sys.executable, "-m", "bench.speculation.equality_worker")
        with Worker(f"equality {case.number}", command, patience=_PATIENCE) as worker:
            loaded = worker.ask("load", kernel=case.kernel, settings=self._process_settings(case))
            if loaded != (case.kernel, case.threads):
                raise RuntimeError(f"the process runs with {loaded}, which is not {case}")
            while asked:
                load = rng.choice([load for load in plan.loads if load <= len(asked)])
                group, asked = asked[:load], asked[load:]
                requests = []
                for place, way in group:
                    request = self._request(place, way)
                    request |= {"client": rng.choice(_CLIENTS), "arrives": rng.randrange(3 * load)}
                    if rng.random() < _LEAVES:
                        request["leaves"] = rng.randrange(1, plan.new_tokens)
                    requests.append(request)
                answers = worker.ask("run", requests=requests)
                for (place, way), request, answer in zip(group, requests, answers, strict=True):
                    self._count(case, load, (place, way), request, answer)

    def _count(
        self, case: Case, load: int, asked: tuple[int, Config], request: Fields, answer: Fields
    ) -> None:
        """Count an answer under each of its circumstances.

        Args:
            case: the process.
            load: number of requests at once.
            asked: index of the prompt, and the way.
            request: the request.
            answer: the answer.
        """
        place, way = asked
        if place not in self._expected:
            (alone,) = run_together(self._engine, [self._request(place, PLAIN)])
            self._expected[place] = alone["tokens"]
        expected = self._expected[place]
        if request["leaves"] is None and len(answer["tokens"]) != len(expected):
            raise RuntimeError(f"{len(answer['tokens'])} tokens came for {place}")
        kinds = {
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
        for kind, value in kinds.items():
            self.counts.setdefault(kind, {}).setdefault(value, Count()).take(
                answer["tokens"], expected
            )

    def _request(self, place: int, way: Config) -> Fields:
        """A request that arrives at once and whose client stays; see `equality_worker.run`."""
        prompt = self.prompts[place]
        asked = {"prompt_tokens": list(self._engine.encode(prompt.text))}
        asked |= {"arrives": 0, "leaves": None, "max_new_tokens": self._plan.new_tokens}
        asked |= {"sampling": asdict(prompt.sampling)}
        return asked | {"drafter": way.drafter, "k_draft": way.k, "adaptive": way.adaptive}

    def _process_settings(self, case: Case) -> Fields:
        chosen = {"threads": case.threads, "prefix_cache": case.prefix_cache}
        own = replace(self._settings, max_batched_tokens=case.pass_tokens, **chosen)
        if case.tight:
            prompts = (self._engine.encode(self.prompts[place].text) for place in case.places)
            longest = max(map(len, prompts)) + self._plan.new_tokens + own.max_k_draft + 1
            tokens = _TIGHT_REQUESTS * -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
            own = replace(own, kv_tokens=tokens, context=tokens)
        return asdict(own)


def outcome(found: Mapping[BenchModel, Mapping[str, Mapping[str, Count]]], plan: Plan) -> Outcome:
    """A table of the configured model's circumstances, and a row for each model of LAYER_KINDS.

    If only the latter ran, the results have a separate name.

    Args:
        found: counts of each model by circumstance and by its value.
        plan: how much was compared.
    """
    sound = not any(
        count.differing
        for counts in found.values()
        for values in counts.values()
        for count in values.values()
    )
    tables, kinds = list[Table](), list[tuple[str, ...]]()
    notes = (
        f"{plan.new_tokens} new tokens for each prompt, greedy; tokens and log-probabilities "
        "compared with those of plain decoding alone, the latter to the bit",
        "groups of requests arrive at random steps; some clients leave after a random token, and "
        f"the tokens so far are compared; {_SLOWEST} answers some of the prompts and ways",
        f"all outputs equal to plain decoding's alone: {yes(sound)}",
    )
    for model, counts in found.items():
        if model.key in LAYER_KINDS:
            kinds.append((model.title, *_cells(counts["all"][""])))
            continue
        rows = [
            (f"{kind}: {value}" if value else kind, *_cells(count))
            for kind, values in counts.items()
            for value, count in sorted(values.items(), key=lambda item: (item[0].zfill(9), item[0]))
        ]
        note = f"{plan.prompts} held-out prompts; each answer is counted under each circumstance"
        columns = ("requests", *_COLUMNS)
        tables.append(Table(f"{_TITLE}: {model.title}", columns, rows, (note, *notes)))
    if kinds:
        note = f"{plan.kind_prompts} held-out prompts, in all ways and circumstances"
        title = f"{_TITLE}: other kinds of layers"
        tables.append(Table(title, ("model", *_COLUMNS), kinds, (note, *notes)))
    result = {
        model.key: {
            kind: {value: asdict(count) for value, count in values.items()}
            for kind, values in counts.items()
        }
        for model, counts in found.items()
    }
    record = {"plan": asdict(plan), "lossless": sound, "counts": result}
    name = "equality-kinds" if kinds and len(tables) == 1 else ""
    return Outcome(record, tables, sound=sound, name=name)


def _cells(count: Count) -> tuple[str, ...]:
    compared = (f"{count.requests:,}", f"{count.tokens:,}")
    return (*compared, str(len(count.first_differences)), str(count.logprobs_differ))
