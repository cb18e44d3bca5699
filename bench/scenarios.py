"""Three scenarios: A the target alone, B the draft alone, C both, speculatively.

C must answer as A does, token by token, and should be on the way to B's speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench import speculation
from bench.models import BenchModel, Progress
from bench.outcome import Outcome
from bench.prompts import Prompt
from bench.quiet import settle
from bench.report import Chart, Series, Table, spread, yes
from bench.speculation import PLAIN, Config, Run, Runner
from bench.stats import Summary, ratios, rotated
from specops.config import ConfigError
from specops.engine import NO_DRAFTER
from specops.models.prepare import choose, prepare

_A, _B = "A: target alone", "B: draft alone"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `each` prompts."""

    each: int
    sizes: speculation.Plan


FULL = Plan(20, speculation.Plan(new_tokens=128, rounds=3))
QUICK = Plan(2, speculation.Plan(new_tokens=16))


@dataclass(frozen=True, slots=True)
class Scenario:
    """Who answers, and how."""

    name: str
    runner: Runner
    config: Config


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan, progress: Progress) -> Outcome:
    """Measure the scenarios in turns.

    Raises:
        ConfigError: the model has no draft.
    """
    scenarios = _scenarios(model)
    sizes = plan.sizes
    found: dict[str, list[Run]] = {scenario.name: [] for scenario in scenarios}
    settle()
    for item in scenarios:
        item.runner.run(prompts[0], item.config, sizes.new_tokens)
    for turn in range(sizes.rounds):
        for number, prompt in enumerate(prompts):
            for item in rotated(scenarios, turn + number):
                found[item.name].append(item.runner.run(prompt, item.config, sizes.new_tokens))
        progress(f"round {turn + 1} of {sizes.rounds}: {len(prompts)} prompts")
    return outcome(model, found, plan)


def _scenarios(model: BenchModel) -> list[Scenario]:
    settings = model.settings
    choice = choose(settings)
    if choice.draft is None:
        raise ConfigError(f"{model.title} has no draft: there is no scenario B")
    both = Runner.load(model)
    draft = prepare(
        choice.draft,
        choice.draft_quant,
        name=f"{choice.name}-draft",
        cache_dir=settings.cache_dir,
        report=lambda text: None,
    )
    alone = replace(settings, target=str(draft.path), draft=NO_DRAFTER, drafter=NO_DRAFTER)
    small = Runner.load(replace(model, settings=alone))
    own = both.engine.info.default_drafter
    k, most = settings.k_draft, settings.max_k_draft
    ways = [Config("draft", k), *(Config(name, most, adaptive=True) for name in ("draft", own))]
    return [
        Scenario(_A, both, PLAIN),
        Scenario(_B, small, PLAIN),
        *(Scenario(f"C: {way.label}", both, way) for way in dict.fromkeys(ways)),
    ]


def outcome(model: BenchModel, found: dict[str, list[Run]], plan: Plan) -> Outcome:
    """The table and the chart; C must answer as A does."""
    rows = {name: _row(runs, found[_A], found[_B]) for name, runs in found.items()}
    answers = len(found[_A])
    sound = all(row["equal"] == answers for name, row in rows.items() if name not in (_A, _B))
    table = Table(
        f"Scenarios: {model.title}",
        ("scenario", "tok/s", "tok/jump", "speed of A", "speed of B", "same tokens as A", "equal"),
        [
            (
                name,
                f"{row['tokens_per_second']:.1f}",
                f"{row['tokens_per_jump']:.2f}",
                spread(Summary(**row["of_a"])),
                spread(Summary(**row["of_b"])),
                f"{row['same_tokens']:.1%}",
                f"{row['equal']}/{answers}",
            )
            for name, row in rows.items()
        ],
        (
            f"{answers // plan.sizes.rounds} prompts of code, {plan.sizes.new_tokens} new tokens "
            f"each, {plan.sizes.rounds} rounds, one stream, greedy; speeds are of decoding, "
            "medians with quartiles over prompts",
            "same tokens as A: share of an answer before it first differs; equal: answers that "
            f"are A's; every C equal: {yes(sound)}",
        ),
    )
    names = list(rows)
    speed = Series(
        "speed of A",
        [rows[name]["of_a"]["median"] for name in names],
        [rows[name]["of_a"]["low"] for name in names],
        [rows[name]["of_a"]["high"] for name in names],
    )
    same = Series("same tokens as A", [rows[name]["same_tokens"] for name in names])
    chart = Chart(
        f"Scenarios: {model.title}", "bars", "", "A = 1",
        [name.replace(", ", ",\n") for name in names], [speed, same], level=1.0,
    )  # fmt: skip
    result = {
        "model": model.key,
        "new_tokens": plan.sizes.new_tokens,
        "rounds": plan.sizes.rounds,
        "scenarios": rows,
        "lossless": sound,
    }
    return Outcome(result, [table], [chart], sound)


def _row(runs: Sequence[Run], a: Sequence[Run], b: Sequence[Run]) -> dict[str, Any]:
    stats = [run.stats for run in runs]
    seconds = [s.decode_seconds for s in stats]
    decoded = sum(s.generated_tokens - 1 for s in stats)
    bases = ([run.stats.decode_seconds for run in base] for base in (a, b))
    of_a, of_b = (Summary.of(ratios(base, seconds)) for base in bases)
    return {
        "tokens_per_second": decoded / sum(seconds),
        "tokens_per_jump": decoded / sum(s.sequence_steps for s in stats),
        "of_a": asdict(of_a),
        "of_b": asdict(of_b),
        "same_tokens": _same(list(zip(runs, a, strict=True))),
        "equal": sum(run.tokens == other.tokens for run, other in zip(runs, a, strict=True)),
    }


def _same(pairs: Sequence[tuple[Run, Run]]) -> float:
    """Mean share of an answer before it first differs from the other."""
    shares = []
    for run, other in pairs:
        equal = [ours == theirs for ours, theirs in zip(run.tokens, other.tokens, strict=True)]
        shares.append((equal.index(False) if False in equal else len(equal)) / len(equal))
    return sum(shares) / len(shares)
