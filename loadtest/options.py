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
from shapes import ARRIVALS, ARRIVALS_RATE, ARRIVALS_SECONDS, FIXED, SHAPES, TRACE, USERS, Stage
from texts import KINDS
from traces import survey
from workload import EDITOR, MEDIAN_ANSWER, MEDIAN_PROMPT

DATASETS = Path(__file__).with_name("datasets")  # what the page can read


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
        "users, each of which waits; arrivals at a rate; trace: at a file's times; or a program",
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
        "all: every kind but editor (typing); code alone for a model that does not chat",
        choices=["all", *KINDS, EDITOR],
    )
    option(
        "--input-len",
        "prompt_tokens",
        0,
        f"tokens of a prompt; 0: like real ones, half of them below {MEDIAN_PROMPT}",
    )
    option(
        "--output-len",
        "answer_tokens",
        0,
        f"most tokens of an answer; 0: like real ones, half of them below {MEDIAN_ANSWER}",
    )
    option("--length-scale", "length_scale", 1.0, "0.5: prompts and answers are half as long")
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
    option("--repeat-share", "repeat_share", 0.0, "0.3: three of ten prompts were sent before")
    option(
        "--prefix-repetition-prefix-len",
        "prefix_tokens",
        0,
        "tokens of a beginning that prompts share; 0: none",
    )
    option("--prefix-repetition-num-prefixes", "prefixes", 10, "different shared beginnings")
    option(
        "--burstiness",
        "burstiness",
        1.0,
        "arrivals: 1 at random times, less in bursts, more at even intervals",
    )
    option(
        "--dataset",
        "dataset",
        "",
        f"file with prompts or a trace; on this page one of {DATASETS.parent.name}/{DATASETS.name}",
    )
    option("--trace-speed", "trace_speed", 1.0, "0.1: the times of a trace pass ten times slower")
    option("--seed", "seed", "", "the same seed makes the same requests; empty: drawn anew")
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
    text = "names under which the page answers beside private ones, such as load.example.org"
    option("--allowed-hosts", "allowed_hosts", "", text, **hidden)
    option("--report", "report", "", "JSON file for the stages' figures", **hidden)
    for flag, what in (("--gate", "for the exit status"), ("--objective", "that define the knee")):
        more = {"action": "append", "metavar": "NAME=LIMIT", **hidden}
        option(flag, flag.strip("-"), None, f"limits {what}", **more)


def settle(options: Namespace) -> None:
    """Fill in what follows from other options, before a run from the command line."""
    if options.num_users is None and options.max_concurrency:
        options.num_users = options.spawn_rate = options.max_concurrency
    limits = (options.num_users, options.run_time, options.number_of_requests, options.request_rate)
    if options.dataset:
        options.dataset = str(Path(options.dataset).absolute())
        timed = survey(Path(options.dataset)).seconds is not None
        if timed and options.load_shape == USERS and not (limits[0] or limits[3]):
            options.load_shape = TRACE
    elif options.headless and options.load_shape == USERS and not any(limits):
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
        ("--prefix-repetition-prefix-len", "prefix_tokens", 0),
        ("--prefix-repetition-num-prefixes", "prefixes", 1),
    ):
        if not least <= getattr(options, name) < math.inf:
            raise ValueError(f"{flag} must be at least {least:g}, not {getattr(options, name)}")
    for name in ("time_scale", "rate_scale", "length_scale", "burstiness", "trace_speed"):
        flag = f"--{name.replace('_', '-')}"
        if not 0 < getattr(options, name) < math.inf:
            raise ValueError(f"{flag} must be more than 0, not {getattr(options, name)}")
    if not 0 <= options.length_spread < 1:
        raise ValueError(f"--range-ratio must be in [0, 1), not {options.length_spread}")
    if not 0 <= options.repeat_share <= 1:
        raise ValueError(f"--repeat-share must be in [0, 1], not {options.repeat_share}")
    if options.request_rate and options.load_shape in FIXED:
        raise ValueError(f"--request-rate goes with the shape arrivals, not {options.load_shape}")
    if options.ignore_eos and not PROTOCOLS[options.protocol].has_ignore_eos:
        raise ValueError(f"--ignore-eos: {options.protocol} has no such field")
    if options.drafter != "default" and options.protocol != "generate":
        raise ValueError("--drafter: only the protocol generate (--api) can choose one")
    _check_editor(options)
    _check_dataset(options)
    if any(stage.open_loop for stage in stages(options)) and not streams(options):
        raise ValueError("arrivals ask for streams: leave --tags and --exclude-tags out")
    _check_processes(options, processes)
    ends = options.number_of_requests or options.dataset
    endless = math.isinf(stages(options)[-1].seconds) and not ends
    if options.headless and endless:
        raise ValueError("nothing ends this test: add --run-time 60s or --num-prompts 100")
    slo.goodput_limits(options.goodput)
    nothing: dict[str, float] = {}
    for changes in (options.gate, options.objective):
        slo.limits(nothing, changes or ())


def dataset(options: Namespace) -> Path | None:
    """The file to read: a name on the page is one of a file in `DATASETS`."""
    return DATASETS / options.dataset if options.dataset else None


def check_page_dataset(name: str) -> None:
    """Refuse what would read another file than those in `DATASETS`.

    Raises:
        ValueError: it would, or there is no such file.
    """
    folder = DATASETS.resolve()
    found = sorted(path.name for path in folder.glob("[!.]*") if path.is_file())
    there = ", ".join(found[:9]) or "nothing yet"
    where = f"loadtest/{DATASETS.name}, where there is {there}"
    if "/" in name or "\\" in name or not (folder / name).resolve().is_relative_to(folder):
        raise ValueError(f"Dataset must be the name of a file in {where}; not a path: {name!r}")
    if name not in found:
        raise ValueError(f"Dataset must be the name of a file in {where}; {name!r} is not there")


def _check_dataset(options: Namespace) -> None:
    path = dataset(options)
    if path is None:
        if options.load_shape == TRACE:
            raise ValueError("the shape trace takes its times from a file: add --dataset FILE")
        return
    timed = survey(path).seconds is not None
    if options.load_shape == TRACE and not timed:
        raise ValueError(f"the data set {path} has no times: take another shape than trace")
    for flag, name, default in (
        ("--repeat-share", "repeat_share", 0.0),
        ("--prefix-repetition-prefix-len", "prefix_tokens", 0),
        ("--input-len", "prompt_tokens", 0),
    ):
        if getattr(options, name) != default:
            raise ValueError(f"{flag} is for made prompts: leave it or --dataset out")


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
        ("--length-scale", "length_scale", 1.0),
        ("--repeat-share", "repeat_share", 0.0),
        ("--prefix-repetition-prefix-len", "prefix_tokens", 0),
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
    if name == TRACE and (path := dataset(options)):
        found = survey(path)
        rate = found.entries / max(found.seconds or 0.0, 1.0)
        return (Stage(seconds, rate=rate * options.trace_speed),)
    if name == ARRIVALS:
        if not (options.run_time or options.number_of_requests):
            seconds = ARRIVALS_SECONDS * options.time_scale
        return (Stage(seconds, rate=(options.request_rate or ARRIVALS_RATE) * options.rate_scale),)
    return (Stage(seconds, users=options.num_users or 1),)
