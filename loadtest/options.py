"""The load test's options: what the command line and Locust's page offer, and what they mean.

Names are those of other benchmarks of LLM servers where these have one. The names of the values
(`dest`) are what Locust's page shows.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import slo
from protocols import PROTOCOLS
from shapes import ARRIVALS, ARRIVALS_RATE, ARRIVALS_SECONDS, FIXED, SHAPES, USERS, Stage
from workload import CATEGORIES, EDITOR, MEDIAN_TOKENS, dataset


def add_to(parser: ArgumentParser) -> None:
    """Add all options."""

    def option(flag: str, dest: str, default: Any, text: str, **more: Any) -> None:
        variable = f"LOAD_{flag.strip('-').replace('-', '_').upper()}"
        if not isinstance(default, bool | None):
            more["type"] = type(default)
        parser.add_argument(flag, dest=dest, default=default, env_var=variable, help=text, **more)

    option(
        "--shape",
        "load_shape",
        USERS,
        "users: a fixed number, each waits for its answer; arrivals: at a rate; or a program",
        choices=SHAPES,
    )
    option(
        "--request-rate",
        "request_rate",
        0.0,
        f"arrivals per second; 0: {ARRIVALS_RATE:g} with the shape arrivals",
    )
    option("--max-concurrency", "max_concurrency", 0, "limit of requests at once; 0: no limit")
    option(
        "--num-prompts",
        "number_of_requests",
        0,
        "stop after this many requests; 0: no limit",
    )
    option("--api", "protocol", "generate", "endpoint to send requests to", choices=list(PROTOCOLS))
    option(
        "--category",
        "kind_of_prompt",
        "all",
        "all: every kind but editor (typing); questions (chat) only for a chat model",
        choices=["all", *CATEGORIES, EDITOR],
    )
    option("--input-len", "prompt_tokens", 0, "tokens of a prompt; 0: the texts as they are")
    option(
        "--output-len",
        "answer_tokens",
        0,
        f"most tokens of an answer; 0: random, half of them below {MEDIAN_TOKENS}",
    )
    option("--range-ratio", "length_spread", 0.0, "0.2: both lengths vary by up to a fifth")
    option(
        "--ignore-eos",
        "ignore_eos",
        False,
        "answers never end before their length",
        action="store_true",
    )
    option("--turns", "turns", 1, "requests of one conversation, each with all before it")
    option(
        "--think-time", "think_time", 0.0, "mean seconds of a user, or between turns, before asking"
    )
    option(
        "--drafter",
        "drafter",
        "default",
        "source of draft tokens; none: plain decoding; only for the protocol generate",
        choices=["default", "draft", "suffix", "head", "cascade", "none"],
    )
    option("--seed", "seed", 0, "the same seed makes the same requests")
    option(
        "--goodput",
        "goodput",
        slo.GOODPUT,
        "limits of a good request, in milliseconds: ttft, tpot, e2el (whole answer)",
    )
    option("--time-scale", "time_scale", 1.0, "0.5: fixed programs and typing take half their time")
    option("--rate-scale", "rate_scale", 1.0, "0.5: ramp has half its arrivals")

    hidden = {"include_in_web_ui": False}
    option("--api-key", "api_key", "", "of several, separated by commas, the first one", **hidden)
    option(
        "--dataset",
        "dataset",
        "",
        "file with prompts: JSON lines (prompt, messages) or ShareGPT's JSON",
        **hidden,
    )
    option("--report", "report", "", "JSON file for the stages' figures", **hidden)
    for flag, what in (("--gate", "for the exit status"), ("--objective", "that define the knee")):
        more = {"action": "append", "metavar": "NAME=LIMIT", **hidden}
        option(flag, flag.strip("-"), None, f"limits {what}", **more)


def settle(options: Namespace) -> None:
    """Fill in what follows from other options, before a run from the command line."""
    if options.num_users is None and options.max_concurrency:
        options.num_users = options.spawn_rate = options.max_concurrency
    limits = (options.num_users, options.run_time, options.number_of_requests, options.request_rate)
    if options.headless and options.load_shape == USERS and not any(limits):
        options.load_shape = "smoke"


def check(options: Namespace, processes: int = 1) -> None:
    """Refuse options that this number of processes cannot run.

    Raises:
        ValueError: what is wrong, in one line.
    """
    for flag, name, least in (
        ("--request-rate", "request_rate", 0.0),
        ("--max-concurrency", "max_concurrency", 0),
        ("--num-prompts", "number_of_requests", 0),
        ("--input-len", "prompt_tokens", 0),
        ("--output-len", "answer_tokens", 0),
        ("--turns", "turns", 1),
        ("--think-time", "think_time", 0.0),
    ):
        if not least <= getattr(options, name) < math.inf:
            raise ValueError(f"{flag} must be at least {least:g}, not {getattr(options, name)}")
    for flag, name in (("--time-scale", "time_scale"), ("--rate-scale", "rate_scale")):
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"{flag} must be more than 0, not {getattr(options, name)}")
    if not 0 <= options.length_spread < 1:
        raise ValueError(f"--range-ratio must be in [0, 1), not {options.length_spread}")
    if options.request_rate and options.load_shape in FIXED:
        raise ValueError(f"--request-rate goes with the shape arrivals, not {options.load_shape}")
    if options.ignore_eos and not PROTOCOLS[options.protocol].has_ignore_eos:
        raise ValueError(f"--ignore-eos: {options.protocol} has no such field")
    if options.drafter != "default" and options.protocol != "generate":
        raise ValueError("--drafter: only the protocol generate (--api) can choose one")
    _check_editor(options)
    if any(stage.open_loop for stage in stages(options)) and not streams(options):
        raise ValueError("arrivals ask for streams: leave --tags and --exclude-tags out")
    _check_processes(options, processes)
    endless = math.isinf(stages(options)[-1].seconds) and not options.number_of_requests
    if options.headless and endless:
        raise ValueError("nothing ends this test: add --run-time 60s or --num-prompts 100")
    slo.goodput_limits(options.goodput)
    nothing: dict[str, float] = {}
    for changes in (options.gate, options.objective):
        slo.limits(nothing, changes or ())
    if options.dataset:
        dataset(Path(options.dataset))


def _check_processes(options: Namespace, processes: int) -> None:
    users = max(stage.locust_users for stage in stages(options))
    if options.number_of_requests and users < processes:
        raise ValueError(
            f"{processes} processes share the requests and need as many users, not {users}"
        )
    if 0 < options.max_concurrency < processes:
        raise ValueError(
            f"{processes} processes share the requests at once: --max-concurrency must be at least"
            f" {processes}, not {options.max_concurrency}"
        )


def _check_editor(options: Namespace) -> None:
    if options.kind_of_prompt != EDITOR:
        return
    if any(stage.open_loop for stage in stages(options)):
        raise ValueError("--category editor types at a speed of its own: take the shape users")
    for flag, name, default in (
        ("--api", "protocol", "generate"),
        ("--dataset", "dataset", ""),
        ("--input-len", "prompt_tokens", 0),
        ("--turns", "turns", 1),
        ("--think-time", "think_time", 0.0),
        ("--ignore-eos", "ignore_eos", False),
        ("--drafter", "drafter", "default"),
    ):
        if getattr(options, name) != default:
            raise ValueError(f"{flag} has no effect on --category editor: leave it out")


def shape(options: Namespace) -> str:
    """The name of the shape: a rate makes arrivals of users."""
    return ARRIVALS if options.request_rate else str(options.load_shape)


def streams(options: Namespace) -> bool:
    """Whether some requests ask for streams."""
    kept, left_out = options.tags or ["stream"], options.exclude_tags or []
    return options.kind_of_prompt != EDITOR and "stream" in kept and "stream" not in left_out


def stages(options: Namespace) -> tuple[Stage, ...]:
    """The stages of the chosen shape."""
    name = shape(options)
    if name in FIXED:
        return tuple(s.scaled(options.time_scale, options.rate_scale) for s in FIXED[name])
    seconds = float(options.run_time or math.inf)
    if name == ARRIVALS:
        if not (options.run_time or options.number_of_requests):
            seconds = ARRIVALS_SECONDS * options.time_scale
        return (Stage(seconds, rate=(options.request_rate or ARRIVALS_RATE) * options.rate_scale),)
    return (Stage(seconds, users=options.num_users or 1),)
