"""What speculation gains: configurations against plain decoding, prompt by prompt, in turns.

Per prompt all configurations run one after the other, so that each ratio compares what the same
machine did with the same text within a second. Every configuration has a controller of its own:
none knows what another one has learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.models import BenchModel, Progress
from bench.prompts import Prompt
from bench.tools.quiet import settle
from bench.tools.report import Table, spread
from bench.tools.stats import Summary, ratios, rotated
from specops.engine.engine import NO_DRAFTER, Engine
from specops.request import GenerationRequest, GenerationStats, SourceStats
from specops.speculation.controller import Controller
from specops.text.chat_template import question

FIXED = 3  # draft tokens a step, where their number is not adaptive
_WARM_UP = 16  # tokens

HOW = (
    "tok/s and speedup are of decoding, without the prompt's pass; configurations in turns for "
    "every prompt; speedup: time of plain decoding over this one's, per prompt and round, median "
    "with quartiles; total: the same of the sums",
    "accepted: of the draft tokens; misses: steps for which the drafter had nothing; tok/jump: "
    "tokens per step, misses included; accept. length: 1 + accepted per draft; equal: greedy "
    "outputs that are token by token those of plain decoding",
)
COLUMNS = (
    "k", "accepted", "misses", "tok/jump", "accept. length", "tok/s", "speedup", "total", "equal",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Config:
    """A drafter, and how much it drafts: `k` tokens a step, or as many as pay and `k` at most."""

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
    """How much is measured: every configuration `rounds` times on every prompt."""

    new_tokens: int
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt under one configuration."""

    tokens: tuple[int, ...]
    stats: GenerationStats


class Runner:
    """Runs single requests on one engine; its controller learns from each configuration apart.

    Args:
        engine: that runs them.
        max_k: most draft tokens.
        chat: prompts are questions, and answers end where the model ends them; else prompts are
            continued, all by the same number of tokens.
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

    def ways(self, *lengths: int) -> list[Config]:
        """All drafters, each with fixed lengths and adaptively."""
        found = []
        for name in self.engine.info.drafters:
            if name != NO_DRAFTER:
                found += [Config(name, k) for k in lengths]
                found.append(Config(name, self._max_k, adaptive=True))
        return found

    def choose(self, config: Config) -> None:
        """What runs next is this configuration, with what its controller has seen so far."""
        scheduler, controller = self.engine.scheduler, self._controllers.get(config)
        if controller is None:
            costs = scheduler.cost_model, scheduler.draft_cost_model
            controller = self._controllers[config] = Controller(*costs, self._max_k)
        scheduler.controller = controller

    def request(self, prompt: Prompt, config: Config, new_tokens: int) -> GenerationRequest:
        """The request; every configuration decodes the same number of tokens."""
        engine, text = self.engine, prompt.text
        if self._chat:
            tokens = engine.encode_chat(engine.render_chat(question(text)))
        else:
            tokens = engine.encode(text)
        return GenerationRequest(
            request_id="bench",
            prompt_tokens=tokens,
            max_new_tokens=new_tokens,
            sampling=prompt.sampling,
            drafter=config.drafter,
            k_draft=config.k,
            adaptive=config.adaptive,
            ignore_eos=not self._chat,
        )

    def run(self, prompt: Prompt, config: Config, new_tokens: int) -> Run:
        """Continue a prompt."""
        self.choose(config)
        outputs = list(self.engine.generate(self.request(prompt, config, new_tokens)))
        stats = outputs[-1].stats
        if stats is None or stats.generated_tokens < 2:
            raise RuntimeError(f"nothing was decoded: {outputs[-1]}")
        return Run(tuple(piece.token for output in outputs for piece in output.pieces), stats)


@dataclass(frozen=True, slots=True)
class Measured:
    """The runs of each configuration, in the order of `prompts`, round by round."""

    prompts: list[Prompt]
    runs: dict[Config, list[Run]]

    def of(self, category: str) -> Measured:
        """What concerns one category."""
        kept = [place for place, item in enumerate(self.prompts) if item.category == category]
        runs = {config: [runs[place] for place in kept] for config, runs in self.runs.items()}
        return Measured([self.prompts[place] for place in kept], runs)

    def rows(self) -> list[Row]:
        """The figures of every configuration, in order."""
        greedy = [not prompt.sampling.temperature for prompt in self.prompts]
        return [
            Row.of(config, runs, self.runs[PLAIN], greedy) for config, runs in self.runs.items()
        ]


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration's figures over all prompts.

    `speedup` is plain decoding's time over this one's, per prompt; `total_speedup` the same of
    the sums. `acceptance` is accepted over draft tokens, `misses` the share of steps without a
    draft where one was asked for.
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
    greedy: int  # runs that are greedy
    equal: int  # of them those whose output is plain decoding's
    sources: Mapping[str, SourceStats]

    @classmethod
    def of(
        cls, config: Config, runs: Sequence[Run], plain: Sequence[Run], greedy: Sequence[bool]
    ) -> Row:
        """Sum a configuration up."""
        stats, bases = [run.stats for run in runs], [run.stats for run in plain]
        decode, base = [s.decode_seconds for s in stats], [s.decode_seconds for s in bases]
        decoded = sum(s.generated_tokens - 1 for s in stats)
        steps, drafts = sum(s.sequence_steps for s in stats), sum(s.drafts for s in stats)
        accepted = sum(s.accepted_tokens for s in stats)
        drafted = sum(s.draft_tokens for s in stats)
        misses = sum(s.draft_misses for s in stats)
        return cls(
            drafter=config.drafter,
            k=config.k,
            adaptive=config.adaptive,
            label=config.label,
            tokens_per_second=decoded / sum(decode),
            acceptance=accepted / drafted if drafted else 0.0,
            misses=misses / (misses + drafts) if misses + drafts else 0.0,
            tokens_per_jump=decoded / steps,
            mean_acceptance_length=1 + accepted / drafts if drafts else 0.0,
            speedup=Summary.of(ratios(base, decode)),
            total_speedup=sum(base) / sum(decode),
            greedy=sum(greedy),
            equal=sum(
                counts and run.tokens == other.tokens
                for counts, run, other in zip(greedy, runs, plain, strict=True)
            ),
            sources=by_source(stats),
        )

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
            spread(self.speedup) if drafts else "",
            f"{self.total_speedup:.2f}" if drafts else "",
            f"{self.equal}/{self.greedy}" if drafts and self.greedy else "",
        )


def by_source(stats: Iterable[GenerationStats]) -> dict[str, SourceStats]:
    """What became of draft tokens by their source and position, over all of these requests."""
    found: dict[str, SourceStats] = {}
    for one in stats:
        for name, source in one.sources.items():
            found[name] = found.get(name, SourceStats()) + source
    return found


def sources_table(row: Row) -> Table:
    """A line per source: its draft tokens, and the share of them accepted at each position."""
    longest = max((len(one.verified_per_position) for one in row.sources.values()), default=0)
    lines = []
    for name, source in row.sources.items():
        pairs = list(zip(source.verified_per_position, source.accepted_per_position, strict=True))
        shares = [f"{accepted / verified:.0%}" for verified, accepted in pairs]
        shares += [""] * (longest - len(pairs))
        lines.append((name, str(sum(source.verified_per_position)), *shares))
    return Table(
        f"Accepted by source and position: {row.label}",
        ("source", "draft tokens", *map(str, range(1, longest + 1))),
        lines,
        ("of the draft tokens that were verified at the position",),
    )


def measure(
    runner: Runner, configs: Sequence[Config], prompts: Sequence[Prompt], sizes: Sizes,
    progress: Progress,
) -> Measured:  # fmt: skip
    """Run every configuration on every prompt, plain decoding among them."""
    if not prompts:
        raise ValueError("there are no prompts to measure on")
    configs = [PLAIN, *(config for config in configs if config != PLAIN)]
    measured = Measured([], {config: [] for config in configs})
    settle()
    for config in configs:  # the first passes fault pages in
        runner.run(prompts[0], config, min(sizes.new_tokens, _WARM_UP))
    for turn in range(sizes.rounds):
        for number, prompt in enumerate(prompts):
            measured.prompts.append(prompt)
            for config in rotated(configs, turn + number):
                measured.runs[config].append(runner.run(prompt, config, sizes.new_tokens))
        progress(f"round {turn + 1} of {sizes.rounds}: {len(prompts)} prompts, {len(configs)} ways")
    return measured
