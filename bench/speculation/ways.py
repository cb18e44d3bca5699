"""Measures speculation's gain: ways of decoding and plain decoding take turns, batch by batch.

All ways run one after the other on each batch, so that each ratio compares the same machine and the
same text within seconds. Each way has its own controller, which learns only from that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from bench.engine.together import Answer, Batch, Promises, run_together
from bench.models import BenchModel
from bench.prompts import Prompt
from bench.tools.quiet import settle
from bench.tools.report import Summary, Table, Target, progress, ratios
from specops.engine.engine import NO_DRAFTER, Engine
from specops.request import GenerationRequest
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import Drafter
from specops.text.chat_template import question

FIXED = 3  # draft tokens per step of ways that are not adaptive
_WARM_UP = 16  # tokens
_WAVES = 4  # minimum number of requests per client: not all of the last ones are counted

HOW = (
    "tok/s: tokens per second in passes in which all clients' requests decode and no prompt is "
    "read; speedup: over plain decoding's by batch, median and quartiles; total: of the sums; "
    "whole: plain decoding's time for all batches, including prompts and the last requests, over "
    "this way's; ways in turns for every batch",
    "accepted: share of draft tokens; misses: steps without a proposal of the drafter; tok/pass: "
    "tokens per request and pass, including misses; accept. length: 1 + accepted per draft; "
    "equal: outputs, greedy or with a seed, with the same tokens as plain decoding",
)


@dataclass(frozen=True, slots=True)
class Config:
    """A drafter and its draft length: `k` tokens per step, or at most `k` if adaptive."""

    drafter: str
    k: int
    adaptive: bool = False

    @property
    def label(self) -> str:
        """The name in tables."""
        if not self.k:
            return "plain"
        return f"{self.drafter}, adaptive" if self.adaptive else f"{self.drafter}, k={self.k}"


PLAIN = Config(NO_DRAFTER, 0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure: every way `rounds` times on every batch.

    A batch is one prompt. With several clients at once it is all prompts, which they ask in turn.

    Attributes:
        new_tokens: maximum number of new tokens per prompt.
        rounds: number of rounds.
        at_once: number of clients.
    """

    new_tokens: int
    rounds: int = 1
    at_once: int = 1


class Runner:
    """Runs batches on one engine, with a controller for each way.

    Args:
        engine: the engine that runs the requests.
        max_k: maximum number of draft tokens per request and step.
        chat: whether prompts are questions whose answers end where the model ends them; otherwise
            all prompts are continued by the same number of tokens.
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
        """All drafters, each with fixed lengths and adaptively, without duplicates.

        Without a draft model or head, a cascade is the same as its lookup.
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
        """The request for a prompt.

        Args:
            prompt: the prompt.
            config: the way to decode it.
            new_tokens: maximum number of new tokens; without `chat`, also the minimum.
        """
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
        """Answer prompts with the way's own controller.

        Several clients' answers have unequal lengths, as users' have. Equal ones would begin and
        end together with plain decoding alone, and then all prompts share a pass.

        Args:
            prompts: the prompts.
            config: the way to decode them.
            new_tokens: maximum number of new tokens per prompt.
            at_once: number of prompts at the same time.
        """
        scheduler = self.engine.scheduler
        if config not in self._controllers:
            self._controllers[config] = Controller(scheduler.cost_model, self._max_k)
        scheduler.controller = self._controllers[config]
        lengths = [new_tokens] * len(prompts)
        if at_once > 1 and not self._chat:
            lengths = Random(0).choices(range(-(-new_tokens // 2), new_tokens + 1), k=len(prompts))
        asked = zip(prompts, lengths, strict=True)
        requests = [self.request(prompt, config, length) for prompt, length in asked]
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
        """How many times as fast as another way it is, batch by batch."""
        rates = ([batch.rate for batch in self.runs[way]] for way in (config, base))
        return Summary.of(ratios(*rates))

    def rate(self, config: Config) -> float:
        """Tokens per second over all batches."""
        runs = self.runs[config]
        return sum(b.tokens for b in runs) / sum(b.decode_seconds for b in runs)

    def best_fixed(self, drafter: str) -> Config:
        """The fastest fixed length of a drafter, or plain decoding."""
        fixed = [way for way in self.runs if not way.adaptive and way.drafter == drafter]
        return max([PLAIN, *fixed], key=self.rate)

    def rows(self) -> list[Row]:
        """The figures of every way, in order."""
        return [self.row(config) for config in self.runs]

    def promises(self, config: Config) -> Promises:
        """Promised and kept acceptance of a way's draft tokens."""
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
        )


def _answers(runs: Sequence[Batch]) -> list[Answer]:
    return [answer for batch in runs for answer in batch.answers]


@dataclass(frozen=True, slots=True)
class Row:
    """One way's figures over all batches.

    `speedup` is over plain decoding by batch, `total_speedup` that of the sums, `whole_speedup`
    that of the total time, including prompts. `acceptance` is the share of draft tokens accepted,
    `misses` the share of steps in which the drafter was asked and proposed nothing.
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
    repeatable: int  # number of answers that are greedy or have a seed
    equal: int  # how many of these have the same tokens as plain decoding

    @property
    def cells(self) -> dict[str, str]:
        """Its cells by column of a table."""
        drafts = bool(self.k)
        return {
            "k": f"≤{self.k}" if self.adaptive else str(self.k),
            "accepted": f"{self.acceptance:.1%}" if drafts else "",
            "misses": f"{self.misses:.1%}" if drafts else "",
            "tok/pass": f"{self.tokens_per_jump:.2f}",
            "accept. length": f"{self.mean_acceptance_length:.2f}" if drafts else "",
            "tok/s": f"{self.tokens_per_second:.1f}",
            "speedup": self.speedup.spread() if drafts else "",
            "total": f"{self.total_speedup:.2f}" if drafts else "",
            "whole": f"{self.whole_speedup:.2f}" if drafts else "",
            "equal": f"{self.equal}/{self.repeatable}" if drafts and self.repeatable else "",
        }


def batches(prompts: Sequence[Prompt], clients: int) -> list[list[Prompt]]:
    """The prompts that run together: each alone, or all of them in a few waves of clients."""
    often = -(-_WAVES * clients // len(prompts))
    return [[prompt] for prompt in prompts] if clients == 1 else [[*prompts] * often]


def measure(
    runner: Runner, configs: Sequence[Config], prompts: Sequence[Prompt], sizes: Sizes
) -> Measured:
    """Run all ways and plain decoding on all batches.

    Args:
        runner: runs them.
        configs: the ways.
        prompts: the prompts, from which batches are made.
        sizes: how much to measure.

    Raises:
        ValueError: there are too few prompts.
        RuntimeError: the requests never all decoded at the same time.
    """
    clients = sizes.at_once
    if len(prompts) < clients:
        raise ValueError(f"{len(prompts)} prompts are too few to measure on, {clients} at once")
    work = batches(prompts, clients)
    configs = list(dict.fromkeys((PLAIN, *configs)))
    measured = Measured([], {config: [] for config in configs})
    settle()
    for config in configs:  # the first passes cause page faults
        runner.run(work[0], config, min(sizes.new_tokens, _WARM_UP), clients)
    for turn in range(sizes.rounds):
        for number, batch in enumerate(work):
            measured.batches.append(batch)
            # Shuffled: a way must not always follow the same one, whose data fill the caches.
            for config in Random(f"{turn}/{number}").sample(configs, len(configs)):
                found = runner.run(batch, config, sizes.new_tokens, clients)
                if not found.tokens:
                    raise RuntimeError("requests never all decoded: ask for more new tokens")
                measured.runs[config].append(found)
    which = ", ".join(measured.categories)
    progress(f"{which}: {len(work)} batches, {clients} at once, {sizes.rounds} rounds")
    return measured


Found = Mapping[str, Measured]
"""Results by the name of each part of an experiment."""


def rows_table(title: str, parts: str, found: Found, *notes: str) -> Table:
    """A row for each way of each part.

    Args:
        title: the table's title.
        parts: heading of the column of parts.
        found: results by part.
        notes: first notes below the table.
    """
    lines = [
        {parts: part, "drafter": row.label, **row.cells}
        for part, item in found.items()
        for row in item.rows()
    ]
    return Table.of(title, lines, (*notes, *HOW))


def record(found: Found) -> dict[str, Any]:
    """The rows of every part, for JSON."""
    return {part: [asdict(row) for row in item.rows()] for part, item in found.items()}


def lossless(found: Found) -> bool:
    """Whether all answers that are greedy or have a seed have plain decoding's tokens."""
    return all(row.equal == row.repeatable for item in found.values() for row in item.rows())


def judged(
    part: str, measured: Measured, own: Config, *, of_plain: float, of_best: float
) -> list[Target]:
    """Targets of adaptive drafts: against plain decoding, and against a fixed length if faster.

    Args:
        part: name of the part.
        measured: its results.
        own: the adaptive way.
        of_plain: minimum speed relative to plain decoding.
        of_best: minimum speed relative to the best fixed length.
    """
    best = measured.best_fixed(own.drafter)
    lines = [Target(f"{part}: {own.label} over plain", of_plain, measured.over(own).median)]
    if best != PLAIN:
        over = measured.over(own, best).median
        lines.append(Target(f"{part}: {own.label} over {best.label}", of_best, over))
    return lines
