"""Which drafter suits which kind of text? Compares all drafters, fixed and adaptive."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.models import BenchModel
from bench.prompts import CODE, Prompt
from bench.speculation import ways
from bench.speculation.ways import FIXED, Config, Measured, Runner, Sizes
from bench.tools.report import Outcome, Target, yes

# Targets of adaptive speculation with the service's default drafter.
_TARGET_ON_CODE, _TARGET_PER_PASS, _TARGET_ANYWHERE = 1.5, 2.2, 0.97


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: `each` prompts per category."""

    each: int
    sizes: Sizes


FULL = Plan(20, Sizes(new_tokens=128, rounds=3))
QUICK = Plan(2, Sizes(new_tokens=16))


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan) -> Outcome:
    """Measure all ways on all prompts."""
    runner = Runner.load(model)
    configs = sorted(runner.ways(FIXED), key=lambda way: way.adaptive)
    measured = ways.measure(runner, configs, prompts, plan.sizes)
    return outcome(model, measured, plan.sizes, runner.own)


def outcome(model: BenchModel, measured: Measured, sizes: Sizes, own: Config) -> Outcome:
    """The table. All greedy answers must equal plain decoding's.

    Args:
        model: the model.
        measured: results of all ways.
        sizes: how much was measured.
        own: the default way.
    """
    found = {text: measured.of(text) for text in measured.categories}
    sound = ways.lossless(found)
    each = {text: len(item.batches) // sizes.rounds for text, item in found.items()}
    counted = ", ".join(f"{count} {text}" for text, count in each.items())
    table = ways.rows_table(
        f"Drafters by kind of text: {model.title}",
        "text",
        found,
        f"{counted} prompts, {sizes.new_tokens} new tokens each, {sizes.rounds} rounds, one stream",
        f"all greedy outputs equal to plain decoding's: {yes(sound)}",
    )
    targets = [
        Target(f"{text}: {own.label} over plain", _TARGET_ON_CODE if text == CODE
               else _TARGET_ANYWHERE, item.over(own).median)
        for text, item in found.items() if own in item.runs
    ]  # fmt: skip
    if CODE in found and own in measured.runs:
        per_pass = found[CODE].row(own).tokens_per_jump
        targets.append(Target("code: tokens per pass", _TARGET_PER_PASS, per_pass))
    result = {"model": model.key, "prompts": each, **asdict(sizes), "lossless": sound}
    result["categories"] = ways.record(found)
    return Outcome(result, [table], targets=targets, sound=sound)
