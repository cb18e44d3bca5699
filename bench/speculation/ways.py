"""What speculation gains: ways of decoding against plain decoding, batch by batch, in turns.

All ways run on a batch one after the other, so that each ratio compares what the same machine did
with the same text within seconds. Every way has a controller of its own, which learns from that way
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from bench.engine.together import Answer, Batch, Promises, run_together
from bench.models import BenchModel
from bench.prompts import Prompt
from bench.tools.quiet import settle
from bench.tools.report import Summary, Table, Target, progress, ratios
from specops.engine.engine import NO_DRAFTER, Engine
from specops.request import GenerationRequest, GenerationStats, SourceStats
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import Drafter
from specops.text.chat_template import question

FIXED = 3  # draft tokens a step of ways that are not adaptive
_WARM_UP = 16  # tokens
_WAVES = 4  # least requests of each client: not all of the last ones are counted

HOW = (
    "tok/s, speedup and total: tokens of passes in which all clients' requests decode and no "
    "prompt is read, over the time of these; over plain decoding's by batch, median with "
    "quartiles; total: the same of the sums; whole: time of all batches, prompts and the last "
    "requests included, of plain decoding over this way's; ways in turns for every batch",
    "accepted: of the draft tokens; misses: steps for which the drafter had nothing; tok/pass: "
    "tokens of a request in a pass, misses included; accept. length: 1 + accepted per draft; "
    "equal: outputs, greedy or with a seed, that are token by token those of plain decoding",
)
COLUMNS = (
    "k", "accepted", "misses", "tok/pass", "accept. length", "tok/s", "speedup", "total", "whole",
    "equal",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    """A drafter, and how much it drafts: `k` tokens a step, or `k` at most if it is adaptive."""

    drafter: str
    k: int
    adaptive: bool = False

    @property
    def label(self) -> str:
        """The name in tables and charts."""
        if not self.k:
            return "plain"
        return f"{self.drafter}, adaptive" if self.adaptive else f"{self.drafter}, k={self.k}"


PLAIN = Config(NO_DRAFTER, 0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: every way `rounds` times on every batch.

    A batch is one prompt. With several clients at once it is all prompts, which they ask in turn.
    """

    new_tokens: int
    rounds: int = 1
    at_once: int = 1


class Runner:
    """Runs batches on one engine, with a controller for each way.

    Args:
        engine: the engine that runs the requests.
        max_k: most draft tokens of a request and step.
        chat: prompts are questions, and answers end where the model ends them; otherwise prompts
            are continued, all by the same number of tokens.
    """

    def __init__(self, engine: Engine, max_k: int, *, chat: bool = False) -> None:
        self.engine = engine
        self._max_k = max_k
        self._chat = chat
        self._controllers: dict[Config, Controller] = {}

    @classmethod
    def load(cls, model: BenchModel, *, chat: bool = False) -> Runner:
        """Load a model's engine."""
        return cls(Engine.load(model.settings), model.settings.max_k_draft, chat=chat)

    @property
    def own(self) -> Config:
        """The service's default way."""
        return Config(self.engine.info.default_drafter, self._max_k, adaptive=True)

    def ways(self, *lengths: int) -> list[Config]:
        """All drafters, each with fixed lengths and adaptively; where two are the same, the first.

        Without a draft model or head a cascade is its lookup.
        """
        names = dict[tuple[Drafter, ...], str]()
        for name, chain in self.engine.scheduler.drafters.items():
            names.setdefault(chain, name)
        found = []
        for name in names.values():
            found += [Config(name, k) for k in lengths]
            found.append(Config(name, self._max_k, adaptive=True))
        return found

    def request(self, prompt: Prompt, config: Config, new_tokens: int) -> GenerationRequest:
        """The request; every way decodes the same number of tokens."""
        engine, text = self.engine, prompt.text
        if self._chat:
            tokens = engine.encode_chat(engine.render_chat(question(text)))
        else:
            tokens = engine.encode(text)
        return GenerationRequest(
            request_id="",
            prompt_tokens=tokens,
            max_new_tokens=new_tokens,
            sampling=prompt.sampling,
            drafter=config.drafter,
            k_draft=config.k,
            adaptive=config.adaptive,
            ignore_eos=not self._chat,
        )

    def run(
        self, prompts: Sequence[Prompt], config: Config, new_tokens: int, at_once: int = 1
    ) -> Batch:
        """Answer prompts, `at_once` of them at a time, with this way's own controller."""
        scheduler = self.engine.scheduler
        if config not in self._controllers:
            self._controllers[config] = Controller(scheduler.cost_model, self._max_k)
        scheduler.controller = self._controllers[config]
        requests = [self.request(prompt, config, new_tokens) for prompt in prompts]
        return run_together(self.engine, requests, at_once)


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of each way on the batches, round by round."""

    batches: list[Sequence[Prompt]]
    runs: dict[Config, list[Batch]]

    @property
    def categories(self) -> list[str]:
        """Categories of the batches; a batch has its first prompt's category."""
        return list(dict.fromkeys(batch[0].category for batch in self.batches))

    @property
    def drafting(self) -> list[Config]:
        """The ways that draft."""
        return [way for way in self.runs if way.k]

    def of(self, category: str) -> Measured:
        """The results on one category."""
        return self.at(
            [place for place, batch in enumerate(self.batches) if batch[0].category == category]
        )

    def at(self, places: Sequence[int]) -> Measured:
        """The results on some of the batches."""
        runs = {config: [runs[place] for place in places] for config, runs in self.runs.items()}
        return Measured([self.batches[place] for place in places], runs)

    def add(self, more: Measured) -> None:
        """Add further rounds of the same ways."""
        self.batches.extend(more.batches)
        for config, runs in more.runs.items():
            self.runs[config].extend(runs)

    def over(self, config: Config, base: Config = PLAIN) -> Summary:
        """How many times as fast a way is as another one, batch by batch."""
        rates = ([batch.rate for batch in self.runs[way]] for way in (config, base))
        return Summary.of(ratios(*rates))

    def rate(self, config: Config) -> float:
        """Tokens per second over all batches."""
        runs = self.runs[config]
        return sum(b.tokens for b in runs) / sum(b.decode_seconds for b in runs)

    def best_fixed(self, drafter: str) -> Config:
        """The fastest fixed way of a drafter: no drafts, or one of its lengths."""
        fixed = [way for way in self.runs if not way.adaptive and way.drafter == drafter]
        return max([PLAIN, *fixed], key=self.rate)

    def rows(self) -> list[Row]:
        """The figures of every way, in order."""
        return [self.row(config) for config in self.runs]

    def promises(self, config: Config) -> Promises:
        """What a way's draft tokens promised."""
        return sum((batch.promises for batch in self.runs[config]), Promises())

    def row(self, config: Config) -> Row:
        """The figures of one way."""
        runs, plain = self.runs[config], self.runs[PLAIN]
        answers = _answers(runs)
        stats = [answer.stats for answer in answers]
        prompts = [prompt for batch in self.batches for prompt in batch]
        equal = [
            mine.tokens == theirs.tokens
            for prompt, mine, theirs in zip(prompts, answers, _answers(plain), strict=True)
            if not prompt.sampling.temperature or prompt.sampling.seed is not None
        ]
        drafts, misses = sum(s.drafts for s in stats), sum(s.draft_misses for s in stats)
        drafted = sum(s.draft_tokens for s in stats)
        accepted = sum(s.accepted_tokens for s in stats)
        return Row(
            **asdict(config),
            label=config.label,
            tokens_per_second=self.rate(config),
            acceptance=accepted / drafted if drafted else 0.0,
            misses=misses / (misses + drafts) if misses + drafts else 0.0,
            tokens_per_jump=sum(b.tokens for b in runs) / sum(b.steps for b in runs),
            mean_acceptance_length=1 + accepted / drafts if drafts else 0.0,
            speedup=self.over(config),
            total_speedup=self.rate(config) / self.rate(PLAIN),
            whole_speedup=sum(b.seconds for b in plain) / sum(b.seconds for b in runs),
            repeatable=len(equal),
            equal=sum(equal),
            sources=by_source(stats),
        )


def _answers(runs: Sequence[Batch]) -> list[Answer]:
    return [answer for batch in runs for answer in batch.answers]


@dataclass(frozen=True, slots=True)
class Row:
    """One way's figures over all batches.

    `speedup` is over plain decoding, by batch; `total_speedup` the same of the sums;
    `whole_speedup` that of the whole time, prompts included. `acceptance` is accepted over draft
    tokens, `misses` the share of steps without a draft where one was asked for.
    """

    drafter: str
    k: int
    adaptive: bool
    label: str
    tokens_per_second: float
    acceptance: float
    misses: float
    tokens_per_jump: float
    mean_acceptance_length: float
    speedup: Summary
    total_speedup: float
    whole_speedup: float
    repeatable: int  # answers that are greedy or have a seed
    equal: int  # of them those whose tokens are plain decoding's
    sources: Mapping[str, SourceStats]

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells below `COLUMNS`."""
        drafts = bool(self.k)
        return (
            f"≤{self.k}" if self.adaptive else str(self.k),
            f"{self.acceptance:.1%}" if drafts else "",
            f"{self.misses:.1%}" if drafts else "",
            f"{self.tokens_per_jump:.2f}",
            f"{self.mean_acceptance_length:.2f}" if drafts else "",
            f"{self.tokens_per_second:.1f}",
            self.speedup.spread() if drafts else "",
            f"{self.total_speedup:.2f}" if drafts else "",
            f"{self.whole_speedup:.2f}" if drafts else "",
            f"{self.equal}/{self.repeatable}" if drafts and self.repeatable else "",
        )


def by_source(stats: Iterable[GenerationStats]) -> dict[str, SourceStats]:
    """Counts of draft tokens by source and position, over all of these requests."""
    found: dict[str, SourceStats] = {}
    for one in stats:
        for name, source in one.sources.items():
            found[name] = found.get(name, SourceStats()) + source
    return found


def measure(
    runner: Runner,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    sizes: Sizes,
) -> Measured:
    """Run all ways, plain decoding among them, on all batches.

    Raises:
        ValueError: there are too few prompts.
        RuntimeError: the requests never all decoded at the same time.
    """
    clients = sizes.at_once
    if len(prompts) < clients:
        raise ValueError(f"{len(prompts)} prompts are too few to measure on, {clients} at once")
    often = -(-_WAVES * clients // len(prompts))
    batches = [[prompt] for prompt in prompts] if clients == 1 else [[*prompts] * often]
    configs = list(dict.fromkeys((PLAIN, *configs)))
    measured = Measured([], {config: [] for config in configs})
    settle()
    for config in configs:  # the first passes fault pages in
        runner.run(batches[0], config, min(sizes.new_tokens, _WARM_UP), clients)
    for turn in range(sizes.rounds):
        for number, batch in enumerate(batches):
            measured.batches.append(batch)
            # Shuffled, so that no way always follows the same one, whose data fill the caches.
            for config in Random(f"{turn}/{number}").sample(configs, len(configs)):
                found = runner.run(batch, config, sizes.new_tokens, clients)
                if not found.tokens:
                    raise RuntimeError("requests never all decoded: ask for more new tokens")
                measured.runs[config].append(found)
    which = ", ".join(measured.categories)
    progress(f"{which}: {len(batches)} batches, {clients} at once, {sizes.rounds} rounds")
    return measured


Found = Mapping[str, Measured]
"""Results by the name of each part of an experiment."""


def rows_table(title: str, parts: str, found: Found, *notes: str) -> Table:
    """A line for every way of every part."""
    lines = [(part, row.label, *row.cells) for part, item in found.items() for row in item.rows()]
    return Table(title, (parts, "drafter", *COLUMNS), lines, (*notes, *HOW))


def record(found: Found) -> dict[str, Any]:
    """The rows of every part, for JSON."""
    return {part: [asdict(row) for row in item.rows()] for part, item in found.items()}


def lossless(found: Found) -> bool:
    """Whether every greedy answer, and every one with a seed, has plain decoding's tokens."""
    return all(row.equal == row.repeatable for item in found.values() for row in item.rows())


def judged(
    part: str, measured: Measured, own: Config, *, of_plain: float, of_best: float
) -> list[Target]:
    """Targets of adaptive drafts: against plain decoding and, if it is faster, the best length."""
    best = measured.best_fixed(own.drafter)
    lines = [Target(f"{part}: {own.label} over plain", of_plain, measured.over(own).median)]
    if best != PLAIN:
        over = measured.over(own, best).median
        lines.append(Target(f"{part}: {own.label} over {best.label}", of_best, over))
    return lines
