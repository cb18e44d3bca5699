"""What guessing gains: each drafter with several draft lengths against plain decoding.

Per prompt all configurations run in turns, so that each ratio compares what the same machine did
with the same text within seconds. Speculation promises the same output; that is checked, in
exact mode token by token, and in default mode it is counted how often a near-tie fell otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.models import BenchModel, Progress
from bench.quiet import settle
from bench.report import Table, spread, yes
from bench.stats import Summary, ratios, rotated
from specops.engine import NO_DRAFTER, Engine
from specops.request import GenerationRequest, GenerationStats
from training.corpus import read_prompts as shipped_prompts

DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. Exact mode, where this processor has it, is checked on the first
    `exact_prompts`.
    """

    prompts: int
    exact_prompts: int
    new_tokens: int
    draft_lengths: tuple[int, ...] = DRAFT_LENGTHS


@dataclass(frozen=True, slots=True)
class Config:
    """Where guesses come from, and how many are asked for."""

    drafter: str
    k: int


PLAIN = Config(NO_DRAFTER, 0)


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt under one configuration."""

    tokens: tuple[int, ...]
    stats: GenerationStats


@dataclass(slots=True)
class Runs:
    """All of one configuration, in the order of the prompts."""

    default: list[Run] = field(default_factory=list)
    exact: list[Run] = field(default_factory=list)


Measured = dict[Config, Runs]


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration's figures over all prompts.

    `speedup` is plain decoding's time over this one's, per prompt; `total_speedup` the same of
    the sums, `request_speedup` of the sums with the prompt's pass. `acceptance` is accepted over
    guessed tokens, `misses` the share of steps without a guess where one was asked for.
    """

    drafter: str
    k: int
    tokens_per_second: float
    acceptance: float
    misses: float
    tokens_per_jump: float
    mean_acceptance_length: float
    speedup: Summary
    total_speedup: float
    request_speedup: float
    equal: int  # prompts whose output is plain decoding's
    exact_equal: int  # the same in exact mode

    @classmethod
    def of(cls, config: Config, runs: Runs, plain: Runs) -> Row:
        """Sum a configuration up."""
        stats = [run.stats for run in runs.default]
        bases = [run.stats for run in plain.default]
        decode, base = [s.decode_seconds for s in stats], [s.decode_seconds for s in bases]
        prefill = sum(s.prefill_seconds for s in stats)
        base_prefill = sum(s.prefill_seconds for s in bases)
        decoded = sum(s.generated_tokens - 1 for s in stats)
        steps, drafts = sum(s.sequence_steps for s in stats), sum(s.drafts for s in stats)
        accepted, guessed = (
            sum(s.accepted_tokens for s in stats),
            sum(s.draft_tokens for s in stats),
        )
        misses = sum(s.draft_misses for s in stats)
        return cls(
            drafter=config.drafter,
            k=config.k,
            tokens_per_second=decoded / sum(decode),
            acceptance=accepted / guessed if guessed else 0.0,
            misses=misses / (misses + drafts) if misses + drafts else 0.0,
            tokens_per_jump=decoded / steps,
            mean_acceptance_length=1 + accepted / drafts if drafts else 0.0,
            speedup=Summary.of(ratios(base, decode)),
            total_speedup=sum(base) / sum(decode),
            request_speedup=(sum(base) + base_prefill) / (sum(decode) + prefill),
            equal=_equal(runs.default, plain.default),
            exact_equal=_equal(runs.exact, plain.exact),
        )


def _equal(runs: Sequence[Run], others: Sequence[Run]) -> int:
    return sum(run.tokens == other.tokens for run, other in zip(runs, others, strict=True))


def read_prompts(path: Path) -> list[str]:
    """Prompts from a file of JSON lines, each with the field `prompt`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines if line.strip()]


def measure(
    model: BenchModel, plan: Plan, progress: Progress, prompts: Sequence[str] | None = None
) -> Measured:
    """Run every configuration on every prompt.

    Args:
        model: the pair.
        plan: how much.
        progress: told about every prompt.
        prompts: texts to continue; the shipped held-out code by default.

    Raises:
        PromptTooLong: a prompt leaves no room in the context.
        ValueError: there are no prompts.
    """
    texts = list(prompts or shipped_prompts())[: plan.prompts]
    engine = Engine.load(model.settings)
    drafters = [name for name in engine.info.drafters if name != NO_DRAFTER]
    configs = [PLAIN, *(Config(name, k) for name in drafters for k in plan.draft_lengths)]
    measured = {config: Runs() for config in configs}
    settle()
    for config in configs:  # the first pass of each width binds
        _run(engine, texts[0], config, plan.new_tokens, exact=False)
    for number, text in enumerate(texts):
        for config in rotated(configs, number):
            run = _run(engine, text, config, plan.new_tokens, exact=False)
            measured[config].default.append(run)
        if number < plan.exact_prompts and engine.info.exact_align is not None:
            for config in configs:
                run = _run(engine, text, config, plan.new_tokens, exact=True)
                measured[config].exact.append(run)
        progress(f"{model.title}: prompt {number + 1} of {len(texts)}")
    return measured


def _run(engine: Engine, text: str, config: Config, new_tokens: int, *, exact: bool) -> Run:
    request = GenerationRequest(
        request_id="bench",
        prompt_tokens=engine.encode(text),
        max_new_tokens=new_tokens,
        drafter=config.drafter,
        k_draft=config.k,
        exact=exact,
        ignore_eos=True,  # every configuration decodes the same number of tokens
    )
    outputs = list(engine.generate(request))
    stats = outputs[-1].stats
    if stats is None or stats.generated_tokens < 2:
        raise RuntimeError(f"nothing was decoded: {outputs[-1]}")
    return Run(tuple(piece.token for output in outputs for piece in output.pieces), stats)


def rows(measured: Measured) -> list[Row]:
    """The figures of every configuration, plain decoding first."""
    return [Row.of(config, runs, measured[PLAIN]) for config, runs in measured.items()]


def lossless(measured: Measured) -> bool | None:
    """In exact mode every configuration's output is plain decoding's; None without such runs."""
    plain = measured[PLAIN].exact
    if not plain:
        return None
    return all(_equal(runs.exact, plain) == len(plain) for runs in measured.values())


def table(model: BenchModel, measured: Measured, plan: Plan) -> Table:
    """A row per configuration."""
    prompts, exact = len(measured[PLAIN].default), len(measured[PLAIN].exact)
    proven = lossless(measured)
    verdict = "not promised on this processor" if proven is None else yes(proven)
    lines = [
        (
            row.drafter if row.k else "plain",
            str(row.k) if row.k else "",
            f"{row.acceptance:.1%}" if row.k else "",
            f"{row.misses:.1%}" if row.k else "",
            f"{row.tokens_per_jump:.2f}",
            f"{row.mean_acceptance_length:.2f}" if row.k else "",
            f"{row.tokens_per_second:.1f}",
            spread(row.speedup) if row.k else "",
            f"{row.total_speedup:.2f}" if row.k else "",
            f"{row.request_speedup:.2f}" if row.k else "",
            f"{row.equal}/{prompts}",
            f"{row.exact_equal}/{exact}" if exact else "",
        )
        for row in rows(measured)
    ]
    columns = (
        "drafter", "k", "accepted", "misses", "tok/jump", "accept. length", "tok/s",
        "speedup", "total", "request", "equal", "equal, exact",
    )  # fmt: skip
    notes = (
        f"{prompts} prompts, {plan.new_tokens} new tokens each, one stream, greedy, "
        "configurations in turns for every prompt; tok/s and speedup are of decoding",
        "speedup: time of plain decoding over this, per prompt, median with quartiles; total: of "
        "the sums; request: of the sums, prompts' passes included",
        "accepted: of the guessed tokens; misses: steps for which the drafter had no guess; "
        "tok/jump: tokens per step, misses included; accept. length: 1 + accepted per draft",
        "equal: prompts whose output is token by token that of plain decoding in the same mode; "
        f"exact mode lossless: {verdict}",
    )
    return Table(f"Speculation: {model.title}", columns, lines, notes)


def result(model: BenchModel, measured: Measured, plan: Plan) -> dict[str, Any]:
    """All of it, fit for JSON."""
    return {
        "model": model.key,
        "prompts": len(measured[PLAIN].default),
        "exact_prompts": len(measured[PLAIN].exact),
        "new_tokens": plan.new_tokens,
        "lossless": lossless(measured),
        "configs": [asdict(row) for row in rows(measured)],
    }
