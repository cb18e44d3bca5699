"""All benchmarks by name: how each is run, how much it measures, and the options of the command."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.agents import reuse
from bench.editor import editor
from bench.memory import caps, shapes
from bench.models import CACHE, LAYER_KINDS, BenchModel, chosen, configured, layer_kind, tinyllama
from bench.peers import compare as peers
from bench.peers import quality
from bench.prompts import CATEGORIES, CODE, CREATIVE, by_category, code, from_file
from bench.runtime import attention, before, kernels
from bench.scale import scale
from bench.serving import at_once, long, order
from bench.speculation import adaptive, chat, compare, concurrency, equality, mtp
from bench.structured import structured
from bench.tools.report import Outcome
from specops.config import ConfigError
from specops.presets import CHAT
from specops.runtime.kernels import NAMES


class Benchmark(NamedTuple):
    """A benchmark: how it is run with the command's options, its plans, and what it measures."""

    run: Callable[[argparse.Namespace, Any], Outcome]
    full: Any
    quick: Any
    text: str


def _attention(options: argparse.Namespace, plan: attention.Plan) -> Outcome:
    if options.other is None:
        raise ConfigError("attention compares with another checkout: --other FOLDER")
    return attention.run(chosen(tuple(attention.SHAPES), options.only), options.other, plan)


def _before(options: argparse.Namespace, plan: before.Plan) -> Outcome:
    if options.other is None:
        raise ConfigError("before compares with another checkout: --other FOLDER")
    models = [] if options.skip_tinyllama else [tinyllama()]
    return before.run([*models, configured()], options.other, plan)


def _order(options: argparse.Namespace, plan: order.Plan) -> Outcome:
    if options.prompts is None:
        raise ConfigError("order needs prompts of real lengths: --prompts FILE")
    model = configured(CHAT)
    return order.run(model, options.prompts, plan, other=options.other, rates=options.rate)


def _sized(options: argparse.Namespace) -> BenchModel:
    return configured() if options.skip_tinyllama else tinyllama()


def _kinds(options: argparse.Namespace) -> list[BenchModel]:
    """The configured model and one of each other kind of layer, if their names have `--only`."""
    model = configured()
    return [
        model if name == model.key else layer_kind(name, options.cache)
        for name in chosen((model.key, *LAYER_KINDS), options.only)
    ]


ALL = ("compare", "concurrency")  # what `all` runs: minutes, no network, no other files
BENCHMARKS = {
    "compare": Benchmark(
        lambda o, plan: compare.run(
            configured(), o.prompts or by_category(plan.each, CATEGORIES), plan
        ),
        compare.FULL, compare.QUICK, "what each drafter gains by kind of text",
    ),
    "concurrency": Benchmark(
        lambda o, plan: concurrency.run(
            configured(), o.prompts or by_category(plan.each, (CODE, CREATIVE)), plan
        ),
        concurrency.FULL, concurrency.QUICK,
        "what speculation gains with several requests at once",
    ),
    "chat": Benchmark(
        lambda o, plan: chat.run(
            configured(CHAT), plan, part=chat.CHOOSING if o.choosing else chat.HELD_OUT
        ),
        chat.FULL, chat.QUICK,
        "what speculation gains on ordinary questions whose answers repeat, or do not",
    ),
    "adaptive": Benchmark(
        adaptive.run, adaptive.FULL, adaptive.QUICK,
        "adaptive drafts beside plain decoding and every length, at set levels of acceptance",
    ),
    "equality": Benchmark(
        lambda o, plan: equality.run(_kinds(o), o.prompts or code(plan.prompts), plan),
        equality.FULL, equality.QUICK, "whether output is always that of plain decoding alone",
    ),
    "mtp": Benchmark(
        mtp.run, mtp.FULL, mtp.QUICK,
        "a model's own MTP block as its drafter, on a small model that it trains first",
    ),
    "structured": Benchmark(
        lambda o, plan: structured.run(configured(), plan), structured.FULL, structured.QUICK,
        "what a grammar costs and saves, and whether answers conform",
    ),
    "agents": Benchmark(
        lambda o, plan: reuse.run(o.templates, plan), reuse.FULL, reuse.QUICK,
        "what later requests of coding agents find in the prefix cache, by chat template",
    ),
    "editor": Benchmark(
        lambda o, plan: editor.run(replace(plan, minutes=o.minutes or plan.minutes), o.cache),
        editor.FULL, editor.QUICK,
        "time from a key stroke to a suggestion, beside llama-server, which it builds first",
    ),
    "kernels": Benchmark(
        lambda o, rounds: kernels.run(_sized(o), rounds), kernels.FULL, kernels.QUICK,
        "where the time of a pass goes, by operator",
    ),
    "attention": Benchmark(
        _attention, attention.FULL, attention.QUICK,
        "attention alone by past, rows and cache, this checkout against another",
    ),
    "before": Benchmark(_before, before.FULL, before.QUICK, "this checkout against another"),
    "caps": Benchmark(caps.run, None, caps.QUICK_SECONDS, "the service under memory caps (root)"),
    "shapes": Benchmark(
        shapes.run, shapes.FULL, shapes.QUICK,
        "published shapes at full size: conversion, service under 4 GB, one token (root)",
    ),
    "peers": Benchmark(
        lambda o, plan: peers.run(plan, o.cache), peers.FULL, peers.QUICK,
        "single passes on GGUF files against llama.cpp and OpenVINO, which it installs first",
    ),
    "quality": Benchmark(
        lambda o, plan: quality.run(o.model, plan, o.cache), quality.FULL, quality.QUICK,
        "what each weight format costs, in quality and in time, beside peers",
    ),
    "serving": Benchmark(
        lambda o, plan: at_once.run(plan, o.cache), at_once.FULL, at_once.QUICK,
        "whole requests over HTTP, against the same peers",
    ),
    "long": Benchmark(
        lambda o, plan: long.run(configured(CHAT), plan, other=o.other, kernels=o.kernels),
        long.FULL, long.QUICK,
        "long prompts and texts over HTTP, with an int8 cache beside another checkout's float16",
    ),
    "order": Benchmark(
        _order, order.FULL, order.QUICK,
        "how long requests of real lengths wait over HTTP, beside another checkout's",
    ),
    "scale": Benchmark(
        lambda o, plan: scale.run(configured(), plan), scale.FULL, scale.QUICK,
        "several replicas behind the gateway, and what the gateway costs",
    ),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only some benchmarks have."""

    def flag(name: str, text: str) -> None:
        parser.add_argument(name, action="store_true", help=text)

    parser.add_argument(
        "--prompts", type=lambda path: from_file(Path(path)),
        help="adaptive, compare, concurrency, equality, order: prompts of your own, JSON lines "
        "with the field `prompt` (order: and `output_tokens_count`)",
    )  # fmt: skip
    parser.add_argument(
        "--kernels",
        choices=NAMES,
        help=f"what computes in this process, and in long's servers (default: {NAMES[0]})",
    )
    flag("--choosing", "chat: the questions for choosing thresholds in place of those held out")
    flag("--skip-tinyllama", "kernels, before: the configured model only, not 1.1 B")
    parser.add_argument("--seconds", type=float, help="caps: of load per case")
    parser.add_argument(
        "--minutes", type=float, help="editor: of the typing trace; mtp: of training (default: 10)"
    )
    parser.add_argument(
        "--other",
        type=Path,
        help="attention, before, long, order: another checkout, with its .venv",
    )
    parser.add_argument(
        "--rate", type=float, action="append", default=[],
        help="order: requests a second, in place of shares of the rate that saturates; may be "
        "given several times",
    )  # fmt: skip
    parser.add_argument(
        "--templates", type=Path, action="append", default=[],
        help="agents: a folder of chat templates (*.jinja); may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--only",
        default="",
        help="adaptive, attention, caps, equality, shapes, mtp: those whose names contain "
        "this, or one of A,B,C",
    )
    flag("--soak", "caps: ten minutes of load of six clients")
    flag("--at-once", f"caps: {caps.AT_ONCE} requests of 200 + 64 tokens must run at once")
    parser.add_argument(
        "--cache", type=Path, default=CACHE,
        help="caps, equality, shapes, mtp, editor, peers, serving, quality: "
        "where what they make and install is kept (default: %(default)s)",
    )  # fmt: skip
