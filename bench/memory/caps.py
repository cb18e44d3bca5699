"""Runs the service under memory caps, in its own cgroups (needs root).

The cases are TinyLlama's shape with a draft model of 160 M parameters under caps from 4 GB down,
and published shapes under 4 GB, each without swap and, if the machine has any, with it. A new run
of a case replaces its earlier results. `--soak` is ten minutes of load. With `--at-once` four
clients send prompts of 200 tokens for answers of 64, and the benchmark fails if fewer than four
requests run at the same time, or if the kernel kills the service.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.memory.capped import GB, SWAP_BYTES, Case, Load, measure
from bench.models import chosen
from bench.tools.report import Outcome, Table, progress

CAPS_GB = {
    ("tinyllama", "int4"): (4.0, 1.5, 1.0, 0.7),
    ("tinyllama", "int8"): (4.0, 1.5, 1.0),
    ("phi3", "int4"): (4.0,),
    ("qwen3-4b", "int4"): (4.0,),
    ("gemma-3-1b", "int4"): (4.0,),
    ("lfm2.5-1.2b", "int4"): (4.0,),
    ("qwen3.5-4b", "int4"): (4.0,),
}
TITLES = {
    "tinyllama": "TinyLlama-1.1B shape, 160 M draft",
    "phi3": "Phi-3 Mini shape (3.8 B)",
    "qwen3-4b": "Qwen3 4B shape, EAGLE-3 head",
    "gemma-3-1b": "Gemma 3 1B shape",
    "lfm2.5-1.2b": "LFM2.5 1.2B shape",
    "qwen3.5-4b": "Qwen3.5 4B shape",
}
AT_ONCE = 4  # requests that must run at the same time
QUICK_SECONDS = 5.0
_LONG = 600.0  # seconds
LOADS = {
    "": Load(seconds=25.0),
    "soak": Load(_LONG, clients=6, prompt_words=(20, 200), new_tokens=(16, 128)),
    "at-once": Load(_LONG, clients=AT_ONCE, prompt_words=(200, 200), new_tokens=(64, 64)),
}
_SWAPS = Path("/proc/swaps")
Entry = dict[str, Any]


def cases() -> Iterator[Case]:
    """All cases, those with large caps first."""
    for (model, quant), caps in CAPS_GB.items():
        for cap in caps:
            for swap in (False, True):
                yield Case(model, quant, cap, swap)


def run(options: argparse.Namespace, seconds: float | None) -> Outcome:
    """Measure the chosen cases, each for `seconds` unless the options or the load say otherwise."""
    kind = "soak" if options.soak else "at-once" if options.at_once else ""
    load = LOADS[kind]
    load = replace(load, seconds=options.seconds or seconds or load.seconds)
    name = f"caps-{kind}" if kind else "caps"
    file = options.results / f"{name}.json"
    swap = len(_SWAPS.read_text("utf-8").splitlines()) > 1
    if not swap:
        progress("skipping cases with swap: this machine has none (swap-setup.sh)")
    possible = {case.name: case for case in cases() if swap or not case.swap}
    names = chosen(possible, options.only)
    for case in map(possible.__getitem__, names):
        record = measure(case, load, options.cache)
        progress(f"{case.name}: {record.ending}, {record.tokens_per_second:.1f} tokens/s")
        keep(file, {"name": case.name, **asdict(case), **asdict(record)})
    return outcome(name, read(file), load, set(names) if kind == "at-once" else set())


def keep(file: Path, entry: Entry) -> None:
    """Save a case in the results, in place of an earlier measurement of it."""
    kept = {old["name"]: old for old in read(file)} | {entry["name"]: entry}
    entries = [kept[case.name] for case in cases() if case.name in kept]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"cases": entries}), encoding="utf-8")


def read(file: Path) -> list[Entry]:
    """The cases in the results; none before the first run."""
    return json.loads(file.read_text(encoding="utf-8"))["cases"] if file.is_file() else []


def outcome(name: str, entries: Sequence[Entry], load: Load, judged: set[str]) -> Outcome:
    """The table, and whether enough requests ran at once in the `judged` cases."""
    sound = all(
        entry["ending"] == "served" and entry["most_running"] >= AT_ONCE
        for entry in entries
        if entry["name"] in judged
    )
    return Outcome({"cases": entries}, [table(entries, load)], sound=sound, name=name)


def table(entries: Sequence[Entry], load: Load) -> Table:
    """A row per case."""
    notes = (
        "; ".join(f"{name}: {title}" for name, title in TITLES.items())
        + "; random weights, whose draft tokens are all rejected: this is plain decoding",
        f"{load.clients} clients, prompts of {_span(load.prompt_words)} words (a token each "
        f"for tinyllama, up to five for others), {_span(load.new_tokens)} new tokens; all files "
        "are evicted from the page cache before; the memory plan chose slots, context and KV "
        "tokens; first: an answer of 8 tokens, alone, before the load; most at once: maximum "
        "number of concurrent requests",
        "major faults: pages of files or swap read from the disk; others' cores: CPU time of the "
        "rest of the machine during the load",
    )
    return Table.of("Under memory caps", [_row(entry) for entry in entries], notes)


def _span(pair: tuple[int, int]) -> str:
    least, most = pair
    return str(least) if least == most else f"{least} to {most}"


def _row(entry: Entry) -> dict[str, str]:
    """A case's cells; a service that the plan refused, or that never answered, has few."""
    planned, served = bool(entry["slots"]), entry["seconds"] > 0

    def count(name: str, known: bool = served) -> str:
        return f"{entry[name]:,}" if known else ""

    def rate(name: str, known: bool = served) -> str:
        return f"{entry[name] / entry['seconds']:.{1 if name == 'tokens' else 0}f}" if known else ""

    return {
        "weights": f"{entry['model']} {entry['quant']}",
        "cap GB": f"{entry['cap_gb']:.1f}",
        "swap": f"{SWAP_BYTES // GB} GB" if entry["swap"] else "none",
        "ending": entry["ending"][:60],
        "slots": count("slots", planned),
        "context": count("context", planned),
        "KV tokens": count("kv_tokens", planned),
        "ready s": f"{entry['start_seconds']:.1f}" if planned else "",
        "first s": f"{entry['first_seconds']:.1f}" if served else "",
        "load s": f"{entry['seconds']:.0f}" if served else "",
        "tokens/s": rate("tokens", served and entry["ending"] == "served"),
        "most at once": count("most_running"),
        "preempted": count("preempted"),
        "answered": count("answered"),
        "429": count("shed"),
        "504": count("late"),
        "failed": count("failed_requests"),
        "peak anonymous MB": f"{entry['peak_anonymous'] / 1e6:.0f}",
        "peak swap MB": f"{entry['peak_swap'] / 1e6:.0f}",
        "major faults/s": rate("major_faults"),
        "OOM kills": str(entry["oom_kills"]),
        "others' cores": f"{entry['strangers']:.2f}" if served else "",
    }
