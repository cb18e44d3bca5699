"""The load test's options, for the command line and Locust's page.

Options have the names of other LLM benchmarks where these have them. Locust's page shows the names
of the values (`dest`).
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import slo
from protocols import PROTOCOLS
from shapes import ARRIVALS, ARRIVALS_RATE, ARRIVALS_SECONDS, FIXED, SHAPES, TRACE, USERS, Stage
from texts import KINDS
from traces import survey
from workload import EDITOR, MEDIAN_ANSWER, MEDIAN_PROMPT

DATASETS = Path(__file__).with_name("datasets")  # the files that the page can read

_BOUNDS: dict[str, Callable[[float], bool]] = {
    "at least 0": lambda value: 0 <= value < math.inf,
    "at least 1": lambda value: 1 <= value < math.inf,
    "more than 0": lambda value: 0 < value < math.inf,
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in [0, 1]": lambda value: 0 <= value <= 1,
}


@dataclass(frozen=True)
class Option:
    """An option of the command line and a field of the page.

    Attributes:
        flag: its name on the command line.
        dest: its name on the page.
        default: the default, whose type is that of all values.
        text: the help text.
        must: the condition for a number, a key of `_BOUNDS`.
        of: "asking": no effect on an editor; "making": no effect on a data set's prompts, either.
        more: further arguments of `add_argument`.
    """

    flag: str
    dest: str
    default: Any
    text: str
    must: str = ""
    of: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


_COMMAND: dict[str, Any] = {"include_in_web_ui": False}  # for the command line only
_LIMITS: dict[str, Any] = {"action": "append", "metavar": "NAME=LIMIT", **_COMMAND}
DRAFTERS = ("default", "draft", "suffix", "head", "cascade", "none")
OPTIONS = (
    Option("--shape", "load_shape", USERS,
        "users: each waits; arrivals: at a rate; trace: at a file's times; or a fixed program",
        more={"choices": SHAPES}),
    Option("--request-rate", "request_rate", 0.0,
        f"arrivals per second; 0: {ARRIVALS_RATE:g} with the shape arrivals", "at least 0"),
    Option("--max-concurrency", "max_concurrency", 0,
        "maximum number of concurrent requests; 0: no limit", "at least 0"),
    Option("--num-prompts", "number_of_requests", 0,
        "stop after this many requests; 0: no limit", "at least 0"),
    Option("--api", "protocol", "generate", "endpoint to send requests to", of="asking",
        more={"choices": list(PROTOCOLS)}),
    Option("--category", "kind_of_prompt", "all",
        "all: every kind but editor (typing); only code for a model without chat",
        more={"choices": ["all", *KINDS, EDITOR]}),
    Option("--input-len", "prompt_tokens", 0,
        f"tokens of a prompt; 0: realistic lengths, half of them below {MEDIAN_PROMPT}",
        "at least 0", "making"),
    Option("--output-len", "answer_tokens", 0,
        f"maximum tokens of an answer; 0: realistic lengths, half of them below {MEDIAN_ANSWER}",
        "at least 0"),
    Option("--length-scale", "length_scale", 1.0, "0.5: prompts and answers are half as long",
        "more than 0", "asking"),
    Option("--range-ratio", "length_spread", 0.0, "0.2: both lengths vary by up to a fifth",
        "in [0, 1)"),
    Option("--ignore-eos", "ignore_eos", False, "answers never end before their length",
        of="asking", more={"action": "store_true"}),
    Option("--turns", "turns", 1, "requests per conversation, each with all earlier turns",
        "at least 1", "asking"),
    Option("--think-time", "think_time", 0.0,
        "mean pause of a user before a request, in seconds", "at least 0", "asking"),
    Option("--drafter", "drafter", "default",
        "drafter; none: plain decoding; only for the protocol generate",
        of="asking", more={"choices": DRAFTERS}),
    Option("--repeat-share", "repeat_share", 0.0, "0.3: three of ten prompts were sent before",
        "in [0, 1]", "making"),
    Option("--prefix-repetition-prefix-len", "prefix_tokens", 0,
        "tokens of a shared prefix; 0: none", "at least 0", "making"),
    Option("--prefix-repetition-num-prefixes", "prefixes", 10, "number of shared prefixes",
        "at least 1"),
    Option("--burstiness", "burstiness", 1.0,
        "of arrivals; 1: at random, less: in bursts, more: at even intervals", "more than 0"),
    Option("--dataset", "dataset", "",
        f"file with prompts or a trace; on this page one of {DATASETS.parent.name}/{DATASETS.name}",
        of="asking"),
    Option("--trace-speed", "trace_speed", 1.0,
        "0.1: play a trace ten times slower", "more than 0"),
    Option("--seed", "seed", "", "the same seed makes the same requests; empty: a random seed"),
    Option("--goodput", "goodput", slo.GOODPUT,
        "limits of a good request, in milliseconds: ttft, tpot, e2el (whole answer)"),
    Option("--time-scale", "time_scale", 1.0,
        "0.5: fixed programs and typing take half the time", "more than 0"),
    Option("--rate-scale", "rate_scale", 1.0, "0.5: ramp has half the arrivals", "more than 0"),
    Option("--api-key", "api_key", "", "API key; the first one if commas separate several",
        more=_COMMAND),
    Option("--allowed-hosts", "allowed_hosts", "",
        "host names of the page in addition to private ones, such as load.example.org",
        more=_COMMAND),
    Option("--report", "report", "", "JSON file for the figures of all stages", more=_COMMAND),
    Option("--gate", "gate", None, "limits for the exit status", more=_LIMITS),
    Option("--objective", "objective", None, "limits that define the knee", more=_LIMITS),
)  # fmt: skip


def add_to(parser: ArgumentParser) -> None:
    """Add all options; each also has an environment variable."""
    for option in OPTIONS:
        more = {
            "env_var": f"LOAD_{option.flag.strip('-').replace('-', '_').upper()}",
            **option.more,
        }
        if not isinstance(option.default, bool | None):
            more["type"] = type(option.default)
        parser.add_argument(
            option.flag, dest=option.dest, default=option.default, help=option.text, **more
        )


def settle(options: Namespace) -> None:
    """Fill in options that follow from others, before a run from the command line."""
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
    """Refuse options that contradict each other or that this number of processes cannot run.

    Raises:
        ValueError: with the problem in one line.
    """
    for option in OPTIONS:
        value = getattr(options, option.dest)
        if option.must and not _BOUNDS[option.must](value):
            raise ValueError(f"{option.flag} must be {option.must}, not {value}")
    if options.request_rate and options.load_shape in FIXED:
        raise ValueError(f"--request-rate goes with the shape arrivals, not {options.load_shape}")
    if options.ignore_eos and not PROTOCOLS[options.protocol].has_ignore_eos:
        raise ValueError(f"--ignore-eos: {options.protocol} has no such field")
    if options.drafter != "default" and options.protocol != "generate":
        raise ValueError("--drafter: only the protocol generate (--api) can choose one")
    _check_editor(options)
    _check_dataset(options)
    if any(stage.open_loop for stage in stages(options)) and not streams(options):
        raise ValueError("arrivals need streams: remove --tags and --exclude-tags")
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
    """The file to read; the page's field names a file in `DATASETS`."""
    return DATASETS / options.dataset if options.dataset else None


def check_page_dataset(name: str) -> None:
    """Refuse the name of anything but a file in `DATASETS`.

    Raises:
        ValueError: the name is a path, or there is no such file.
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
    _refuse_given(options, "{} is for generated prompts: remove it or --dataset", "making")


def _refuse_given(options: Namespace, why: str, *of: str) -> None:
    for option in OPTIONS:
        if option.of in of and getattr(options, option.dest) != option.default:
            raise ValueError(why.format(option.flag))


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
        raise ValueError("--category editor types at its own speed: use the shape users")
    why = f"{{}} has no effect on --category {EDITOR}: remove it"
    _refuse_given(options, why, "asking", "making")


def shape(options: Namespace) -> str:
    """The name of the shape; a rate implies `arrivals`."""
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
