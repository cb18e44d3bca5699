"""Every benchmark by name: its model, its prompts, how much it measures, and its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.engine import scheduling
from bench.memory import caps
from bench.models import CACHE, TINYLLAMA_VOCAB, BenchModel, Progress, configured, tinyllama
from bench.peers import compare as peers
from bench.peers import quality
from bench.peers.environment import install
from bench.peers.models import peer_models
from bench.prompts import CATEGORIES, CODE, CREATIVE, Prompt, by_category, code, from_file
from bench.runtime import before, kernels, kv
from bench.scale import scale
from bench.scale import simulated as many
from bench.serving import at_once
from bench.speculation import chat, compare, concurrency, drafted, equality, simulated
from bench.structured import structured
from bench.tools.report import Outcome
from specops.config import ConfigError
from specops.presets import CHAT

_THREADS = 2  # of each side against peers
_AGAINST = {"threads": _THREADS, "vocab": TINYLLAMA_VOCAB}
_KERNEL_ROUNDS = 10
_DRAFT_WEIGHTS = ("int8-128", "int4-128-rtn")  # random weights have nothing to look at
_REAL_DRAFT_WEIGHTS = ("int8-128", "int4-32", "int4-128")


def _compare(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = compare.QUICK if options.quick else compare.FULL
    prompts = _own(options) or by_category(plan.each, CATEGORIES)
    return compare.run(configured(), prompts, plan, progress)


def _concurrency(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = concurrency.QUICK if options.quick else concurrency.FULL
    prompts = _own(options) or by_category(plan.each, (CODE, CREATIVE))
    return concurrency.run(configured(), prompts, plan, progress)


def _chat(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = chat.QUICK if options.quick else chat.FULL
    return chat.run(configured(CHAT), plan, progress, choosing=options.choosing)


def _simulated(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = simulated.QUICK if options.quick else simulated.FULL
    return simulated.run(
        _sized(options, progress), _own(options) or code(plan.each), plan, progress
    )


def _drafted(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = drafted.QUICK if options.quick else drafted.FULL
    models = {quant: tinyllama(progress, draft_quant=quant) for quant in _DRAFT_WEIGHTS}
    demo = configured()
    pairs = {
        quant: replace(demo, settings=replace(demo.settings, draft_quant=quant))
        for quant in _REAL_DRAFT_WEIGHTS
    }
    return drafted.run(models, pairs, _own(options) or code(plan.own), plan, progress)


def _equality(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = equality.QUICK if options.quick else equality.FULL
    return equality.run(configured(), _own(options) or code(plan.prompts), plan, progress)


def _structured(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = structured.QUICK if options.quick else structured.FULL
    return structured.run(configured(), plan, progress)


def _before(options: argparse.Namespace, progress: Progress) -> Outcome:
    if options.other is None:
        raise ConfigError("before compares with another checkout: --other FOLDER")
    models = [] if options.skip_tinyllama else [tinyllama(progress)]
    plan = before.QUICK if options.quick else before.FULL
    return before.run([*models, configured()], options.other, plan, progress)


def _kernels(options: argparse.Namespace, progress: Progress) -> Outcome:
    return kernels.run(_sized(options, progress), 1 if options.quick else _KERNEL_ROUNDS, progress)


def _kv(options: argparse.Namespace, progress: Progress) -> Outcome:
    own = configured()
    models = [own, *(kv.folder_model(folder, own) for folder in options.folder)]
    if own.settings.model == "demo" and not own.settings.target:
        models.insert(1, kv.in_fp32(own))
    return kv.run(models, kv.QUICK if options.quick else kv.FULL, progress)


def _scheduling(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = scheduling.QUICK if options.quick else scheduling.FULL
    return scheduling.run(tinyllama(progress, cache=options.cache), plan, progress)


def _caps(options: argparse.Namespace, progress: Progress) -> Outcome:
    kind = "soak" if options.soak else "at-once" if options.at_once else ""
    load = caps.LOADS[kind]
    seconds = options.seconds or (caps.QUICK_SECONDS if options.quick else load.seconds)
    load = replace(load, seconds=seconds)
    folders = {"cache": options.cache, "results": options.results}
    return caps.run(kind, load, options.only, **folders, progress=progress)


def _peers(options: argparse.Namespace, progress: Progress) -> Outcome:
    python = install(progress)
    files, model = peer_models(python, progress), tinyllama(progress)
    plan = peers.QUICK if options.quick else peers.FULL
    sides = peers.sides(model, _THREADS, python, files)
    return peers.outcome(model.title, peers.measure(sides, plan, progress=progress, **_AGAINST))


def _quality(options: argparse.Namespace, progress: Progress) -> Outcome:
    if options.model is None:
        raise ConfigError(
            "quality takes a model: python -m bench quality MODEL, a GGUF or a folder"
        )
    plan = quality.QUICK if options.quick else quality.FULL
    return quality.run(options.model, plan, progress, options.cache)


def _serving(options: argparse.Namespace, progress: Progress) -> Outcome:
    python = install(progress)
    files, model = peer_models(python, progress), tinyllama(progress)
    plan = at_once.QUICK if options.quick else at_once.FULL
    sides = at_once.peers(python, files)
    measured = at_once.measure(model, sides, plan, progress=progress, **_AGAINST)
    return at_once.outcome(model.title, measured)


def _scale(options: argparse.Namespace, progress: Progress) -> Outcome:
    return scale.run(configured(), scale.QUICK if options.quick else scale.FULL, progress)


def _scale_simulated(options: argparse.Namespace, progress: Progress) -> Outcome:
    plan = many.QUICK if options.quick else many.FULL
    return many.run(configured(), options.results, plan, progress)


def _own(options: argparse.Namespace) -> list[Prompt]:
    return from_file(options.prompts) if options.prompts else []


def _sized(options: argparse.Namespace, progress: Progress) -> BenchModel:
    """TinyLlama's shape, unless it is to be left out."""
    return configured() if options.skip_tinyllama else tinyllama(progress)


ALL = ("compare", "concurrency")  # what `all` runs: minutes, no network, no other files
BENCHMARKS: dict[str, tuple[Callable[[argparse.Namespace, Progress], Outcome], str]] = {
    "compare": (_compare, "what each drafter gains by kind of text"),
    "concurrency": (_concurrency, "what speculation gains with several requests at once"),
    "chat": (_chat, "what speculation gains on ordinary questions, by their kind"),
    "simulated": (_simulated, "speculation at TinyLlama's size, at set levels of acceptance"),
    "drafted": (_drafted, "from which acceptance on a draft model pays at TinyLlama's size"),
    "equality": (_equality, "whether output is always that of plain decoding alone"),
    "structured": (_structured, "what a grammar costs and saves, and whether answers fit it"),
    "kernels": (_kernels, "the operators of a pass"),
    "kv": (_kv, "quality and size of the KV cache's elements"),
    "before": (_before, "against another checkout"),
    "scheduling": (_scheduling, "what requests cost each other"),
    "caps": (_caps, "the service under memory caps (root)"),
    "peers": (_peers, "single passes against llama.cpp and OpenVINO, which it installs first"),
    "quality": (_quality, "what each kind of weights costs, in quality and in time, beside peers"),
    "serving": (_serving, "whole requests at once against the same"),
    "scale": (_scale, "several replicas behind the gateway, and what it costs itself"),
    "scale-simulated": (_scale_simulated, "a thousand of them, from what `scale` measured"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that only some benchmarks have."""

    def flag(name: str, text: str) -> None:
        parser.add_argument(name, action="store_true", help=text)

    parser.add_argument(
        "--prompts",
        type=Path,
        help="compare, concurrency, simulated, drafted, equality: prompts of your own, JSON lines "
        "with the field `prompt`",
    )
    flag("--choosing", "chat: the questions for choosing thresholds in place of those held out")
    flag("--skip-tinyllama", "kernels, simulated, before: the configured model only, not 1.1 B")
    parser.add_argument("--seconds", type=float, help="caps: of load per case")
    parser.add_argument("--other", type=Path, help="before: the other checkout, with its .venv")
    parser.add_argument(
        "--folder", type=Path, action="append", default=[],
        help="kv: a model's folder, beside the configured model; may be given several times",
    )  # fmt: skip
    parser.add_argument("--only", default="", help="caps: cases whose names contain this")
    flag("--soak", "caps: ten minutes of load, with a time series")
    flag("--at-once", f"caps: {caps.AT_ONCE} requests of 200 + 64 tokens must run at once")
    parser.add_argument(
        "--cache", type=Path, default=CACHE,
        help="scheduling, caps: where models with random weights are kept (default: %(default)s)",
    )  # fmt: skip
