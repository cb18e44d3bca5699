"""The experiments on speculation by name: which model, which prompts, how much."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench import assisted, compare, concurrency, equality, gamma, levels, scenarios, watched
from bench.models import Progress, configured, tinyllama
from bench.outcome import Outcome
from bench.prompts import (
    CATEGORIES,
    CODE,
    CREATIVE,
    EXTRACTIVE,
    STRUCTURED,
    Prompt,
    by_category,
    code,
    from_file,
)

_GREEDY = (CODE, STRUCTURED, EXTRACTIVE)


def _compare(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = compare.QUICK if options.quick else compare.FULL
    prompts = _own(options) or by_category(plan.each, CATEGORIES)
    return compare.run(configured(), prompts, plan.sizes, progress)


def _gamma(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = gamma.QUICK if options.quick else gamma.FULL
    return gamma.run(configured(), _own(options) or code(plan.each), plan, progress)


def _scenarios(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = scenarios.QUICK if options.quick else scenarios.FULL
    return scenarios.run(configured(), _own(options) or code(plan.each), plan, progress)


def _concurrency(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = concurrency.QUICK if options.quick else concurrency.FULL
    prompts = _own(options) or by_category(plan.each, (CODE, CREATIVE))
    return concurrency.run(configured(), prompts, plan, progress)


def _simulated(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = levels.QUICK if options.quick else levels.FULL
    model = configured() if options.skip_tinyllama else tinyllama(progress)
    prompts = _own(options) or code(2 * plan.each)
    return levels.run(model, prompts, plan, progress, _earlier("simulated", options))


def _watched(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = watched.QUICK if options.quick else watched.FULL
    prompts = _own(options) or code(max(plan.clients))
    return watched.run(configured(), prompts, plan, progress, _earlier("watched", options))


def _earlier(name: str, options: argparse.Namespace) -> list[Any]:
    """The runs in the results that this one is to stand beside."""
    file = options.results / f"{name}.json"
    if not options.add or not file.is_file():
        return []
    runs: list[Any] = json.loads(file.read_text(encoding="utf-8"))["runs"]
    return runs


def _equality(options: argparse.Namespace, progress: Progress) -> Outcome:
    base = equality.QUICK if options.quick else equality.FULL
    plan = replace(base, seconds=options.seconds)
    checkpoint = options.results / "equality.checkpoint.json"
    prompts = _own(options) or code(plan.prompts)
    return equality.run(configured(), prompts, plan, checkpoint, progress)


def _transformers(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = assisted.QUICK if options.quick else assisted.FULL
    prompts = _own(options) or by_category(plan.each, _GREEDY)
    return assisted.run(configured(), prompts, plan.sizes, progress)


EXPERIMENTS: dict[str, Callable[[argparse.Namespace, Progress], Outcome]] = {
    "compare": _compare,
    "gamma": _gamma,
    "scenarios": _scenarios,
    "concurrency": _concurrency,
    "simulated": _simulated,
    "equality": _equality,
    "transformers": _transformers,
    "watched": _watched,
}
ALWAYS = ("compare", "gamma", "scenarios", "concurrency")  # what `all` runs

HELP = (
    "compare: drafters by kind of text; gamma: fixed draft lengths; scenarios: target, draft, "
    "both; concurrency: several requests at once; simulated: set levels of acceptance at "
    "TinyLlama's size; equality: speculative against plain output; transformers: its assisted "
    "generation (needs torch); watched: a Prometheus and an open console"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that only experiments have."""
    parser.add_argument(
        "--add",
        action="store_true",
        help="simulated, serving, watched: one more run beside those in the results",
    )
    parser.add_argument("--rounds", type=int, help="serving: how often every case is measured")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="equality: stop after so long; the next run goes on there",
    )


def _own(options: argparse.Namespace) -> list[Prompt]:
    return from_file(options.prompts) if options.prompts else []
