"""All benchmarks by name: how to run each, how much it measures, and the command's options."""

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
from bench.runtime import attention, before, kernels, products
from bench.scale import scale
from bench.serving import at_once, long, order
from bench.speculation import adaptive, chat, compare, concurrency, equality, mtp
from bench.structured import structured
from bench.tools.report import Outcome
from specops.config import ConfigError
from specops.presets import CHAT
from specops.runtime.kernels import NAMES


class Benchmark(NamedTuple):
    """A benchmark: a function that runs it, its two plans, and the question that it answers."""

    run: Callable[[argparse.Namespace, Any], Outcome]
    full: Any
    quick: Any
    text: str


def _other(options: argparse.Namespace) -> Path:
    """The other checkout, which the benchmark needs."""
    if options.other is None:
        raise ConfigError(f"{options.benchmark} compares with another checkout: --other FOLDER")
    other: Path = options.other
    return other


def _before(options: argparse.Namespace, plan: before.Plan) -> Outcome:
    other = _other(options)
    models = [] if options.skip_tinyllama else [tinyllama()]
    return before.run([*models, configured()], other, plan, options.kernels)


def _order(options: argparse.Namespace, plan: order.Plan) -> Outcome:
    if options.prompts is None:
        raise ConfigError("order needs prompts of real lengths: --prompts FILE")
    model = configured(CHAT)
    return order.run(model, options.prompts, plan, other=options.other, rates=options.rate)


def _sized(options: argparse.Namespace) -> BenchModel:
    return configured() if options.skip_tinyllama else tinyllama()


def _kinds(options: argparse.Namespace) -> list[BenchModel]:
    """The configured model and one per other kind of layer, filtered by `--only`."""
    model = configured()
    return [
        model if name == model.key else layer_kind(name, options.cache)
        for name in chosen((model.key, *LAYER_KINDS), options.only)
    ]


ALL = ("compare", "concurrency")  # for `all`: these take minutes and need no network or files
BENCHMARKS = {
    "compare": Benchmark(
        lambda o, plan: compare.run(
            configured(), o.prompts or by_category(plan.each, CATEGORIES), plan
        ),
        compare.FULL, compare.QUICK, "the gain from each drafter by kind of text",
    ),
    "concurrency": Benchmark(
        lambda o, plan: concurrency.run(
            configured(), o.prompts or by_category(plan.each, (CODE, CREATIVE)), plan
        ),
        concurrency.FULL, concurrency.QUICK,
        "the gain from speculation with several requests at once",
    ),
    "chat": Benchmark(
        lambda o, plan: chat.run(
            configured(CHAT), plan, part=chat.CHOOSING if o.choosing else chat.HELD_OUT
        ),
        chat.FULL, chat.QUICK,
        "the gain from speculation on ordinary questions, by whether answers repeat themselves",
    ),
    "adaptive": Benchmark(
        adaptive.run, adaptive.FULL, adaptive.QUICK,
        "adaptive drafts against plain decoding and fixed lengths, at simulated acceptance",
    ),
    "equality": Benchmark(
        lambda o, plan: equality.run(_kinds(o), o.prompts or code(plan.prompts), plan),
        equality.FULL, equality.QUICK, "whether output always equals that of plain decoding",
    ),
    "mtp": Benchmark(
        mtp.run, mtp.FULL, mtp.QUICK,
        "a model's MTP block as its drafter, on a small model that it trains first",
    ),
    "structured": Benchmark(
        lambda o, plan: structured.run(configured(), plan), structured.FULL, structured.QUICK,
        "cost and gain of grammars, and whether answers conform",
    ),
    "agents": Benchmark(
        lambda o, plan: reuse.run(o.templates, plan), reuse.FULL, reuse.QUICK,
        "how much of a coding agent's prompt comes from the prefix cache, by chat template",
    ),
    "editor": Benchmark(
        lambda o, plan: editor.run(replace(plan, minutes=o.minutes or plan.minutes), o.cache),
        editor.FULL, editor.QUICK,
        "time from keystroke to suggestion, against llama-server, which it builds first",
    ),
    "kernels": Benchmark(
        lambda o, rounds: kernels.run(_sized(o), rounds), kernels.FULL, kernels.QUICK,
        "the time of a pass by operator",
    ),
    "attention": Benchmark(
        lambda o, plan: attention.run(chosen(attention.SHAPES, o.only), _other(o), plan),
        attention.FULL, attention.QUICK,
        "attention alone by past, rows and cache, against another checkout",
    ),
    "products": Benchmark(
        lambda o, plan: products.run(chosen(products.WEIGHTS, o.only), _other(o), plan),
        products.FULL, products.QUICK,
        "products with weights alone by type and rows, against another checkout",
    ),
    "before": Benchmark(_before, before.FULL, before.QUICK, "steps, against another checkout"),
    "caps": Benchmark(caps.run, None, caps.QUICK_SECONDS, "the service under memory caps (root)"),
    "shapes": Benchmark(
        shapes.run, shapes.FULL, shapes.QUICK,
        "published shapes at full size: conversion, service in 4 GB, time of one token (root)",
    ),
    "peers": Benchmark(
        lambda o, plan: peers.run(plan, o.cache), peers.FULL, peers.QUICK,
        "single passes on GGUF files against llama.cpp and OpenVINO, which it installs first",
    ),
    "quality": Benchmark(
        lambda o, plan: quality.run(o.model, plan, o.cache), quality.FULL, quality.QUICK,
        "quality and speed of each weight format, ours and those of peers",
    ),
    "serving": Benchmark(
        lambda o, plan: at_once.run(plan, o.cache), at_once.FULL, at_once.QUICK,
        "whole requests over HTTP, against the same peers",
    ),
    "long": Benchmark(
        long.run, long.FULL, long.QUICK,
        "long prompts and texts over HTTP, with an int8 cache, against another checkout's float16",
    ),
    "order": Benchmark(
        _order, order.FULL, order.QUICK,
        "waiting times of requests of real lengths over HTTP, against another checkout",
    ),
    "scale": Benchmark(
        lambda o, plan: scale.run(configured(), plan), scale.FULL, scale.QUICK,
        "several replicas behind the gateway, and the gateway's cost",
    ),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only some benchmarks use."""

    def flag(name: str, text: str) -> None:
        parser.add_argument(name, action="store_true", help=text)

    parser.add_argument(
        "--prompts", type=lambda path: from_file(Path(path)),
        help="adaptive, compare, concurrency, equality, order: your own prompts, JSON lines with "
        "the field `prompt` (for order also `output_tokens_count`)",
    )  # fmt: skip
    parser.add_argument(
        "--kernels",
        choices=NAMES,
        help=f"kernels of this process, and of those of before and long (default: {NAMES[0]})",
    )
    flag("--choosing", "chat: the questions for choosing thresholds instead of the held-out ones")
    flag("--skip-tinyllama", "kernels, before: only the configured model, not TinyLlama's shape")
    parser.add_argument("--seconds", type=float, help="caps: duration of the load per case")
    parser.add_argument(
        "--minutes", type=float, help="editor: minutes of typing; mtp: of training (default: 10)"
    )
    parser.add_argument(
        "--other",
        type=Path,
        help="attention, before, long, order, products: another checkout, with its .venv",
    )
    parser.add_argument(
        "--rate", type=float, action="append", default=[],
        help="order: requests per second, instead of shares of the saturating rate; may be given "
        "several times",
    )  # fmt: skip
    parser.add_argument(
        "--templates", type=Path, action="append", default=[],
        help="agents: a folder of chat templates (*.jinja); may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--only",
        default="",
        help="adaptive, attention, caps, equality, long, mtp, products, shapes: cases whose names "
        "contain this, or one of A,B,C (long: by default only the configured model, not "
        f"{long.SHAPE})",
    )
    flag("--llama", "long: first tokens of llama.cpp with a q8_0 cache, too; installs it first")
    flag("--soak", "caps: ten minutes of load from six clients")
    flag("--at-once", f"caps: {caps.AT_ONCE} requests of 200 + 64 tokens must run at once")
    parser.add_argument(
        "--cache", type=Path, default=CACHE,
        help="caps, equality, shapes, mtp, editor, long, peers, serving, quality: "
        "folder for models and installed peers (default: %(default)s)",
    )  # fmt: skip
