"""How much does a model's own MTP block gain as its drafter, and how much does a useless one cost?

Three models: a small Qwen3.5 trained for minutes on the demo pair's text, the same with random
weights, and Qwen3.5 0.8B's shape with random weights. The blocks of the last two guess nothing
right. The block drafts alone, lookups draft alone, or both draft, which is the default. Both are
compared with lookups alone, to see the block's cost.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from bench import prompts
from bench.memory.capped import WEIGHTS
from bench.models import BenchModel, BuildError, chosen, plain, shape
from bench.speculation import ways
from bench.speculation.ways import PLAIN, Measured, Runner, Sizes
from bench.tools.report import Outcome, Target, progress
from specops.config import Settings
from specops.system.folders import atomic_folder
from training.files import PROCESS_ENVIRONMENT

MINUTES = 10.0  # of training
TRAINED, RANDOM, WHOLE = "trained", "random", "qwen3.5-0.8b"
_QUANT = {TRAINED: "int8-32", RANDOM: "int8-32"}
_REPOSITORY = "Qwen/Qwen3.5-0.8B"
_NO_LOSS = 0.97
_LEAST = {TRAINED: 1.1, RANDOM: _NO_LOSS, WHOLE: _NO_LOSS}  # of plain decoding's speed
_CONTEXT = 2048  # the small models have half of it
_BLOCK, _LOOKUPS = "head", "suffix"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: `prompts` prompts of code, each `sizes.rounds` times."""

    prompts: int
    sizes: Sizes


FULL = Plan(12, Sizes(new_tokens=128, rounds=4))
QUICK = Plan(1, Sizes(new_tokens=16))


def run(options: argparse.Namespace, plan: Plan) -> Outcome:
    """Measure the models whose names contain `--only`, one after the other."""
    found = {}
    for name in chosen(_LEAST, options.only):
        runner = Runner.load(BenchModel(name, name, _settings(name, options)))
        alone = [replace(runner.own, drafter=drafter) for drafter in (_BLOCK, _LOOKUPS)]
        texts = prompts.code(plan.prompts)
        found[name] = ways.measure(runner, [*alone, runner.own], texts, plan.sizes)
    return outcome(found, plan)


def _settings(name: str, options: argparse.Namespace) -> Settings:
    if name == WHOLE:
        folder = shape(_REPOSITORY, WEIGHTS["int8"], options.cache)
    else:
        minutes = (options.minutes or MINUTES) if name == TRAINED else 0.0
        folder = trained(minutes, options.cache)
    settings = plain(folder, options.cache / "mtp")
    # Without the prefix cache no run reuses an earlier run's answers.
    return replace(
        settings,
        draft="",
        drafter="",
        quant=_QUANT.get(name, ""),
        context=_CONTEXT,
        prefix_cache="off",
    )


def trained(minutes: float, cache: Path) -> Path:
    """Train a checkpoint for this many minutes, unless the cache has it.

    Raises:
        BuildError: the training failed; it needs the extra `train`.
    """
    folder = cache / f"mtp-{minutes:g}-minutes"
    if not folder.is_dir():
        progress(f"training for {minutes:g} minutes to {folder}")
        environment = PROCESS_ENVIRONMENT | os.environ
        with atomic_folder(folder) as part:
            command = [sys.executable, "-m", "training.mtp", str(part), "--minutes", str(minutes)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment
            )
            if done.returncode:
                raise BuildError(f"the training failed: {done.stderr.strip()}")
        progress(done.stdout.strip().rpartition("\n")[2])
    return folder


def outcome(found: dict[str, Measured], plan: Plan) -> Outcome:
    """The table, and two targets for each model: the block alone, and together with lookups."""
    targets = []
    for name, measured in found.items():
        block, lookups, both = measured.drafting
        for way, base in ((block, PLAIN), (both, lookups)):
            title = f"{name}, {way.drafter} over {base.drafter if base.k else base.label}"
            least = _LEAST[name] if base == PLAIN else _NO_LOSS
            targets.append(Target(title, least, measured.over(way, base).median))
    note = f"{plan.prompts} prompts of code, {plan.sizes.new_tokens} tokens each, greedy"
    table = ways.rows_table("A model's own MTP block as its drafter", "model", found, note)
    sound = ways.lossless(found)
    return Outcome({"models": ways.record(found)}, [table], targets=targets, sound=sound)
