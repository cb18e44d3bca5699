"""The experiments on speculation by name: which model, which prompts, how much."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import (
    assisted,
    before,
    compare,
    concurrency,
    equality,
    gamma,
    kv,
    levels,
    scenarios,
    watched,
)
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
from specops.config import ConfigError

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
    prompts = _own(options) or code(plan.each)
    return levels.run(model, prompts, plan, progress, _earlier("simulated", options, plan))


def _watched(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = watched.QUICK if options.quick else watched.FULL
    prompts = _own(options) or code(max(plan.clients))
    return watched.run(configured(), prompts, plan, progress, _earlier("watched", options, plan))


def _earlier(name: str, options: argparse.Namespace, plan: Any) -> list[Any]:
    """The runs in the results that this one is to stand beside: those of the same plan."""
    file = options.results / f"{name}.json"
    if not options.add or not file.is_file():
        return []
    document = json.loads(file.read_text(encoding="utf-8"))
    same = document.get("plan") == json.loads(json.dumps(asdict(plan)))
    runs: list[Any] = document["runs"] if same else []
    return runs


def _equality(options: argparse.Namespace, progress: Progress) -> Outcome:
    base = equality.QUICK if options.quick else equality.FULL
    plan = replace(base, seconds=options.seconds)
    checkpoint = options.results / "equality.checkpoint.json"
    prompts = _own(options) or code(plan.prompts)
    return equality.run(configured(), prompts, plan, checkpoint, progress)


def _before(options: argparse.Namespace, progress: Progress) -> Outcome:
    if options.other is None:
        raise ConfigError("before compares with another checkout: --other FOLDER")
    models = [configured()]
    if not options.skip_tinyllama:
        models.insert(0, tinyllama(progress))
    plan = before.QUICK if options.quick else before.FULL
    return before.run(models, options.other, plan, progress)


def _kv(options: argparse.Namespace, progress: Progress) -> Outcome:
    own = configured()
    models = [own, *(kv.folder_model(folder, own) for folder in options.folder)]
    if own.settings.model == "demo" and not own.settings.target:
        models.insert(1, kv.in_fp32(own))
    return kv.run(models, kv.QUICK if options.quick else kv.FULL, progress)


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
    "before": _before,
    "kv": _kv,
}
ALWAYS = ("compare", "gamma", "scenarios", "concurrency")  # what `all` runs

HELP = (
    "compare: drafters by kind of text; gamma: fixed draft lengths; scenarios: target, draft, "
    "both; concurrency: several requests at once; simulated: set levels of acceptance at "
    "TinyLlama's size; equality: output in all circumstances against plain decoding alone; "
    "transformers: its assisted generation (needs torch); watched: a Prometheus and an open "
    "console; before: against another checkout; kv: elements of the KV cache"
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
    parser.add_argument("--other", type=Path, help="before: the other checkout, with its .venv")
    parser.add_argument(
        "--folder",
        type=Path,
        action="append",
        default=[],
        help="kv: a model's folder, beside the configured model; may be given several times",
    )


def _own(options: argparse.Namespace) -> list[Prompt]:
    return from_file(options.prompts) if options.prompts else []
