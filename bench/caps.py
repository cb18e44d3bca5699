"""`python -m bench.caps`: the service under memory caps, in cgroups made by hand (root).

TinyLlama's shape with a draft of 160 M parameters under caps from 4 GB down, Phi-3 Mini's under
4 GB; without swap and with it. Cases are measured one by one and kept in bench/results/caps.json,
so that a new run of one replaces that one; the table and the plot are drawn from what is kept. A
soak is one case for ten minutes, with a time series. `--at-once` has four clients send prompts of
200 tokens for answers of 64, again and again, and sees how many of them really run together.

    python -m bench.caps                                    every case
    python -m bench.caps --only int4-1.0GB                  those whose names contain this
    python -m bench.caps --missing --most 4                 four of those that are not kept yet
    python -m bench.caps --draw                             the tables and the plots alone
    python -m bench.caps --soak --only tinyllama-int4-1.0GB-noswap
    python -m bench.caps --at-once --only tinyllama-int4-1.0GB-noswap --seconds 600
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.capped import GB, SWAP_BYTES, Case, Load, Outcome, measure, prepared, progress
from bench.cgroup import CgroupError
from bench.machine import describe
from bench.models import CACHE
from bench.plots import save
from bench.report import Chart, Series, Table, write

RESULTS = Path(__file__).resolve().parent / "results"
CAPS_GB = {
    ("tinyllama", "int4"): (4.0, 1.5, 1.0, 0.7),
    ("tinyllama", "int8"): (4.0, 1.5, 1.0),
    ("phi3", "int4"): (4.0,),
}
TITLES = {"tinyllama": "TinyLlama-1.1B shape, 160 M draft", "phi3": "Phi-3 Mini shape (3.8 B)"}
TABLE_LOAD = Load(seconds=25.0)
SOAK_LOAD = Load(
    seconds=600.0, clients=6, prompt_words=(20, 200), new_tokens=(16, 128), sample_every=5.0
)
AT_ONCE = 4  # requests that are to run at the same time
AT_ONCE_LOAD = Load(
    seconds=600.0, clients=AT_ONCE, prompt_words=(200, 200), new_tokens=(64, 64), sample_every=5.0
)
LOADS = {  # by the results' name: what the table is called, and its load
    "caps": ("Under memory caps", TABLE_LOAD),
    "caps-soak": ("Under memory caps, for long", SOAK_LOAD),
    "caps-at-once": ("Requests at once under memory caps", AT_ONCE_LOAD),
}
DISTURBED = 0.3  # cores that others took: such a case is measured again
Entry = dict[str, Any]


def cases() -> Iterator[Case]:
    """All of them, the roomy ones first."""
    for (model, quant), caps in CAPS_GB.items():
        for cap in caps:
            for swap in (False, True):
                yield Case(model, quant, cap, swap)


# -- what is kept ------------------------------------------------------------------------------


def keep(case: Case, outcome: Outcome, folder: Path, name: str = "caps") -> None:
    """Put an outcome into the results, in place of an earlier one of the same case.

    Args:
        case: what was measured.
        outcome: what became of it.
        folder: of the results.
        name: of the results, a key of `LOADS`.
    """
    kept = {entry["name"]: entry for entry in read(folder, name)}
    kept[case.name] = {"name": case.name, **asdict(case), **asdict(outcome)}
    order = [case.name for case in cases()]
    entries = sorted(kept.values(), key=lambda entry: order.index(entry["name"]))
    publish(entries, folder, name)


def publish(entries: Sequence[Entry], folder: Path, name: str) -> None:
    """Write what is kept: JSON, table, plot."""
    charts = table_charts(entries) if name == "caps" else soak_charts(entries)
    document = {"quick": False, "machine": asdict(describe()), "cases": list(entries)}
    write(folder, name, document, [table(entries, name)], charts)
    save(folder / name, charts)


def read(folder: Path, name: str = "caps") -> list[Entry]:
    """What is kept of the cases that there are; empty before the first run."""
    with suppress(FileNotFoundError):
        entries: list[Entry] = json.loads((folder / f"{name}.json").read_text("utf-8"))["cases"]
        known = {case.name for case in cases()}
        return [entry for entry in entries if entry["name"] in known]
    return []


# -- what is shown -----------------------------------------------------------------------------


def table(entries: Sequence[Entry], name: str) -> Table:
    """A row per case."""
    columns = (
        *("weights", "cap GB", "swap", "ending", "slots", "context", "KV tokens", "ready s"),
        *("first s", "load s", "tokens/s", "most at once", "preempted"),
        *("answered", "429", "504", "failed"),
        *("peak anonymous MB", "peak swap MB", "major faults/s", "OOM kills", "others' cores"),
    )
    title, load = LOADS[name]
    machine = describe()
    return Table(
        title,
        columns,
        [_cells(entry) for entry in entries],
        notes=(
            f"tinyllama: {TITLES['tinyllama']}; phi3: {TITLES['phi3']}; random weights, of whose "
            "draft tokens none stand: what is shown is plain decoding",
            f"{load.clients} clients, prompts of {_span(load.prompt_words)} words (a token each, "
            f"five for phi3), {_span(load.new_tokens)} new tokens; everything is put out "
            "of the page cache before; slots, context and KV tokens by default, as the memory plan "
            "chose them; first: an answer of 8 tokens, alone, before the load; most at once: "
            "requests that held a slot at the same time",
            "major faults: pages of files or swap that had to be read from the disk; "
            "others' cores: CPU time that the rest of the machine took meanwhile",
            f"{machine.cpu}, {machine.threads} threads, onnxruntime {machine.onnxruntime}, "
            f"{max(entry['date'][:10] for entry in entries)}",
        ),
    )


def _span(pair: tuple[int, int]) -> str:
    least, most = pair
    return str(least) if least == most else f"{least} to {most}"


def _cells(entry: Entry) -> tuple[str, ...]:
    served, rate = entry["seconds"] > 0, _rate(entry)
    return (
        f"{entry['model']} {entry['quant']}",
        f"{entry['cap_gb']:.1f}",
        f"{SWAP_BYTES // GB} GB" if entry["swap"] else "none",
        entry["ending"][:60],
        f"{entry['slots']}" if entry["slots"] else "",
        f"{entry['context']:,}" if entry["slots"] else "",
        f"{entry['kv_tokens']:,}" if entry["slots"] else "",
        f"{entry['start_seconds']:.1f}" if entry["slots"] else "",
        f"{entry['first_seconds']:.1f}" if "first_seconds" in entry and served else "",
        f"{entry['seconds']:.0f}" if served else "",
        "" if rate is None else f"{rate:.1f}",
        f"{entry['most_running']}" if served else "",
        f"{entry['preempted']}" if served else "",
        f"{entry['answered']}" if served else "",
        f"{entry['shed']}" if served else "",
        f"{entry.get('late', 0)}" if served else "",
        f"{entry['failed_requests']}" if served else "",
        f"{entry['peak_anonymous'] / 1e6:.0f}",
        f"{entry['peak_swap'] / 1e6:.0f}",
        f"{entry['major_faults'] / entry['seconds']:.0f}" if served else "",
        str(entry["oom_kills"]),
        f"{entry['strangers']:.2f}" if served and "strangers" in entry else "",
    )


def _rate(entry: Entry) -> float | None:
    return entry["tokens"] / entry["seconds"] if entry["ending"] == "served" else None


def table_charts(entries: Sequence[Entry]) -> list[Chart]:
    """Tokens per second by cap, a chart per model and kind of weights with several caps."""
    charts = []
    for (model, quant), caps in CAPS_GB.items():
        rates = {
            (entry["cap_gb"], entry["swap"]): _rate(entry)
            for entry in entries
            if (entry["model"], entry["quant"]) == (model, quant)
        }
        series = [
            Series(
                "swap" if swap else "no swap",
                [rates.get((cap, swap)) for cap in caps],
            )
            for swap in (False, True)
        ]
        if rates and len(caps) > 1:
            charts.append(
                Chart(
                    f"{TITLES[model]}, {quant}",
                    "bars",
                    "memory cap (no bar: it was killed or refused)",
                    "tokens per second, 2 clients",
                    [f"{cap:g} GB" for cap in caps],
                    series,
                )
            )
    return charts


def soak_charts(entries: Sequence[Entry]) -> list[Chart]:
    """Memory and tokens over time, two charts per soak."""
    charts = []
    for entry in entries:
        samples, title = (
            entry["samples"],
            f"{entry['model']} {entry['quant']}, {entry['cap_gb']:g} GB",
        )
        places = [
            f"{sample['seconds'] / 60:.0f}" if number % 24 == 0 else ""
            for number, sample in enumerate(samples)
        ]
        rates = [
            (after["tokens"] - before["tokens"]) / (after["seconds"] - before["seconds"])
            for before, after in pairwise(samples)
        ]
        memory = [
            Series(name, [sample[kind] / 1e6 for sample in samples])
            for name, kind in (("anonymous", "anonymous"), ("page cache", "file"), ("swap", "swap"))
        ]
        charts += [
            Chart(title, "lines", "minutes", "MB", places, memory, level=entry["cap_gb"] * 1000),
            Chart(
                title, "lines", "minutes", "tokens per second", places[1:], [Series("all", rates)]
            ),
        ]
    return charts


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for.

    Returns:
        0; 1 where a case of `--at-once` was killed or fewer requests ran at the same time; 2 where
        no cgroup can be made.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.caps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument(
        "--missing", action="store_true", help="cases that are not kept yet, or were disturbed"
    )
    parser.add_argument("--most", type=int, default=1000, help="no more cases than this")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--soak", action="store_true", help="a long load, with a time series")
    kinds.add_argument(
        "--at-once", action="store_true", help=f"{AT_ONCE} requests of 200 + 64 tokens at once"
    )
    parser.add_argument("--seconds", type=float, help="of load per case")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--prepare", action="store_true", help="make what is made once, no more")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through `finally`
    name = "caps-soak" if options.soak else "caps-at-once" if options.at_once else "caps"
    if options.prepare:
        for case in _chosen(options, name):
            prepared(case, options.cache)
        return 0
    if not options.draw and not _measured(options, name):
        return 2
    if entries := read(options.results, name):
        publish(entries, options.results, name)
        print(table(entries, name).text())
    wanted = [case.name for case in _chosen(options, name)] if options.at_once else []
    return int(any(e["name"] in wanted and not _met(e) for e in read(options.results, name)))


def _met(entry: Entry) -> bool:
    """Whether enough requests ran at once and nobody was killed."""
    return entry["ending"] == "served" and entry["most_running"] >= AT_ONCE


def _measured(options: argparse.Namespace, name: str) -> bool:
    """Measure the cases that were asked for, if cgroups can be made; whether they can."""
    _, load = LOADS[name]
    if options.seconds:
        load = replace(load, seconds=options.seconds)
    for case in _chosen(options, name):
        try:
            outcome = measure(case, load, options.cache)
        except CgroupError as error:
            progress(str(error))
            return False
        progress(f"{case.name}: {outcome.ending}, {outcome.tokens_per_second:.1f} tokens/s")
        keep(case, outcome, options.results, name)
    return True


def _chosen(options: argparse.Namespace, name: str) -> list[Case]:
    kept = set()
    if options.missing:
        kept = {
            entry["name"]
            for entry in read(options.results, name)
            if entry.get("strangers", 0.0) < DISTURBED
        }
    chosen = [case for case in cases() if options.only in case.name and case.name not in kept]
    if options.prepare:  # which does not depend on the cap
        chosen = list({(case.model, case.quant): case for case in chosen}.values())
    elif len(Path("/proc/swaps").read_text().splitlines()) < 2:
        progress("cases with swap are left out: this machine has none (swap-setup.sh)")
        chosen = [case for case in chosen if not case.swap]
    return chosen[: options.most]


if __name__ == "__main__":
    sys.exit(main())
