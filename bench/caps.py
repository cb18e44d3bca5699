"""`python -m bench.caps`: the service under memory caps, in cgroups made by hand (root).

TinyLlama's shape with a draft of 160 M parameters, random weights, under caps from 4 GB down, with
mapped weights and with copied ones, without swap and with it. Cases are measured one by one and
kept in bench/results/caps.json, so that a new run of one replaces that one; the table and the plot
are drawn from what is kept.

    python -m bench.caps                        every case
    python -m bench.caps --only int4-1.0GB      those whose names contain this
    python -m bench.caps --draw                 the table and the plot alone
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import matplotlib

from bench.cgroup import Cgroup, CgroupError, cgroup
from bench.machine import describe
from bench.models import tinyllama_pair
from bench.report import Table, write
from bench.server import Client, ServerError, serving
from specops.config import Settings
from specops.models.prepare import choose, prepare
from specops.models.weight_cache import prepacked_graph

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "caps.png"
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "bench"
GB = 10**9
CAPS_GB = {"int4": (4.0, 1.5, 1.0, 0.7), "int8": (4.0, 2.0, 1.5)}
_SWAP_BYTES = 12 * GB
_CLIENTS = 2
_NEW_TOKENS = 32
_PROMPT_WORDS = 60
_SAMPLE_SECONDS = 0.1
_WORDS = ("class", "def", "return", "import", "value", "self", "raise", "yield", "while", "path")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    quant: str  # int4 or int8, blocks of 128
    cap_gb: float
    mapped: bool  # weights in the page cache; else on the heap
    swap: bool

    @property
    def name(self) -> str:
        """Such as `int4-1.0GB-mapped-noswap`."""
        weights = "mapped" if self.mapped else "copied"
        return f"{self.quant}-{self.cap_gb}GB-{weights}-{'swap' if self.swap else 'noswap'}"


@dataclass(slots=True)
class Outcome:
    """What became of it. Bytes; counts are of the group, from its first process on."""

    ending: str = "served"  # or `refused by the plan`, `killed`, or what went wrong
    rows: int = 0
    context: int = 0
    start_seconds: float = 0.0
    seconds: float = 0.0  # of the load
    tokens: float = 0.0
    failed_requests: int = 0
    peak_anonymous: int = 0
    peak_swap: int = 0
    major_faults: int = 0  # during the load
    oom_kills: int = 0
    date: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Of all clients together."""
        return self.tokens / self.seconds if self.seconds else 0.0


def cases() -> Iterator[Case]:
    """All of them, the roomy ones first."""
    for quant, caps in CAPS_GB.items():
        for cap in caps:
            for swap in (False, True):
                for mapped in (True, False):
                    yield Case(quant, cap, mapped, swap)


def measure(case: Case, seconds: float, cache: Path) -> Outcome:
    """Start the service under the cap, load it, and say what happened.

    Raises:
        CgroupError: no cgroup can be made here.
    """
    settings = _settings(case, cache)
    _evict(cache)  # what others have read would be charged to nobody, and stay
    outcome = Outcome(date=describe().date)
    swap = _SWAP_BYTES if case.swap else 0
    with cgroup(f"specops-caps-{os.getpid()}", memory=int(case.cap_gb * GB), swap=swap) as group:
        with _watched(group, outcome):
            begin, users = time.monotonic(), list[threading.Thread]()
            try:
                with serving(settings, group.enclosed) as (_, client):
                    outcome.start_seconds = time.monotonic() - begin
                    outcome.rows, outcome.context = _shape(client)
                    before = group.counters()["pgmajfault"]
                    users = _load(client, seconds, outcome)
                    outcome.major_faults = group.counters()["pgmajfault"] - before
            except (ServerError, OSError, HTTPException) as error:
                outcome.ending = _told(error)
            for user in users:
                user.join()
        outcome.oom_kills = group.oom_kills()
        if outcome.oom_kills:
            outcome.ending = "killed"
    return outcome


def _told(error: Exception) -> str:
    text = str(error)
    return "refused by the plan" if " do not fit: " in text else f"{type(error).__name__}: {text}"


def _settings(case: Case, cache: Path) -> Settings:
    target, draft = tinyllama_pair(_progress, f"{case.quant}-128", cache)
    settings = Settings(
        target=str(target),
        draft=str(draft),
        prepack=case.mapped,
        cache_dir=cache / "caps",
        drain_timeout=0,  # the load ends with the server
    )
    if case.mapped:  # made outside of the cap, once: a cache in a volume outlives containers
        choice = choose(settings)
        for source, quant, name in (
            (choice.target, choice.target_quant, choice.name),
            (choice.draft, choice.draft_quant, f"{choice.name}-draft"),
        ):
            if source is None:
                raise AssertionError("the pair has a draft")
            folder = prepare(
                source, quant, name=name, cache_dir=settings.cache_dir, report=_progress
            )
            label = f"{folder.name}-{folder.quant}"
            prepacked_graph(folder.graph, label, settings.cache_dir, _progress)
    return settings


def _evict(folder: Path) -> None:
    """Put every file below a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _watched(group: Cgroup, outcome: Outcome) -> Iterator[None]:
    """Keep the largest figures of the group as long as the context lasts."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            outcome.peak_anonymous = max(outcome.peak_anonymous, group.counters()["anon"])
            outcome.peak_swap = max(outcome.peak_swap, group.swap_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _load(client: Client, seconds: float, outcome: Outcome) -> list[threading.Thread]:
    """Let the clients ask for a while and count what was generated.

    Returns:
        The clients. Their last answers end with the server: under the tightest caps they would
        take minutes.
    """
    stop = threading.Event()

    def ask(seed: int) -> None:
        own, rng = Client(client.port), random.Random(seed)
        try:
            while not stop.is_set():
                own.generate(_body(rng))
        except (ServerError, OSError, HTTPException):
            if not stop.is_set():
                outcome.failed_requests += 1
        finally:
            own.close()

    users = [threading.Thread(target=ask, args=(seed,)) for seed in range(_CLIENTS)]
    for user in users:
        user.start()
    name = "specops_generated_tokens_total"
    before, begin = client.metric(name), time.monotonic()
    while time.monotonic() - begin < seconds and not outcome.failed_requests:
        time.sleep(_SAMPLE_SECONDS)
    stop.set()
    outcome.tokens = client.metric(name) - before
    outcome.seconds = time.monotonic() - begin
    return users


def _body(rng: random.Random) -> dict[str, Any]:
    prompt = " ".join(rng.choice(_WORDS) for _ in range(_PROMPT_WORDS))
    return {"prompt": prompt, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}


def _shape(client: Client) -> tuple[int, int]:
    """Rows and context that were planned."""
    (labels,) = re.findall(r"^specops_model_info\{(.*)\}", client.metrics(), re.MULTILINE)
    found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    return int(found["rows"]), int(found["context"])


# -- what is kept and drawn --------------------------------------------------------------------


def keep(case: Case, outcome: Outcome, folder: Path) -> None:
    """Put an outcome into caps.json, in place of an earlier one of the same case."""
    kept = {entry["name"]: entry for entry in read(folder)}
    kept[case.name] = {"name": case.name, **asdict(case), **asdict(outcome)}
    order = [case.name for case in cases()]
    entries = sorted(kept.values(), key=lambda entry: order.index(entry["name"]))
    write(folder, "caps", {"machine": asdict(describe()), "cases": entries}, [_table(entries)])


def read(folder: Path) -> list[dict[str, Any]]:
    """What is kept; empty before the first run."""
    path = folder / "caps.json"
    with suppress(FileNotFoundError):
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cases"]
        return entries
    return []


def _table(entries: list[dict[str, Any]]) -> Table:
    columns = (
        *("weights", "cap GB", "kept as", "swap", "ending", "rows x context", "ready s"),
        *("tokens/s", "peak anonymous MB", "peak swap MB", "major faults/s", "OOM kills"),
    )
    longest = max((entry["seconds"] for entry in entries), default=0)
    return Table(
        "Under memory caps: TinyLlama-1.1B shape with a 160 M draft, random weights",
        columns,
        [_cells(entry) for entry in entries],
        notes=(
            f"{_CLIENTS} clients, prompts of {_PROMPT_WORDS} words, {_NEW_TOKENS} new tokens, "
            f"{longest:.0f} s of load each, after everything was put out of the page cache; "
            "rows and context by default, as the memory plan chose them",
            "kept as: mapped = prepacked file in the page cache, copied = SPECOPS_PREPACK=0",
            f"measured on {describe().line}",
        ),
    )


def _cells(entry: dict[str, Any]) -> tuple[str, ...]:
    served = entry["seconds"] > 0
    rate = entry["tokens"] / entry["seconds"] if served else 0.0
    faults = f"{entry['major_faults'] / entry['seconds']:.0f}" if served else ""
    return (
        entry["quant"],
        f"{entry['cap_gb']:.1f}",
        "mapped" if entry["mapped"] else "copied",
        "12 GB" if entry["swap"] else "none",
        entry["ending"][:60],
        f"{entry['rows']} x {entry['context']}" if entry["rows"] else "",
        f"{entry['start_seconds']:.1f}" if entry["rows"] else "",
        f"{rate:.1f}" if served else "",
        f"{entry['peak_anonymous'] / 1e6:.0f}",
        f"{entry['peak_swap'] / 1e6:.0f}",
        faults,
        str(entry["oom_kills"]),
    )


def draw(entries: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second by cap, a panel per kind of weights."""
    quants = list(dict.fromkeys(entry["quant"] for entry in entries))
    figure, axes = plt.subplots(
        1, len(quants), figsize=(4.5 * len(quants), 3.6), squeeze=False, sharey=True
    )
    kinds = [(True, False), (False, False), (True, True), (False, True)]
    for axis, quant in zip(axes[0], quants, strict=True):
        caps = sorted({entry["cap_gb"] for entry in entries if entry["quant"] == quant})
        for place, (mapped, swap) in enumerate(kinds):
            rates = {
                entry["cap_gb"]: entry["tokens"] / entry["seconds"] if entry["seconds"] else 0.0
                for entry in entries
                if (entry["quant"], entry["mapped"], entry["swap"]) == (quant, mapped, swap)
            }
            where = [caps.index(cap) + (place - 1.5) * 0.2 for cap in rates]
            label = f"{'mapped' if mapped else 'copied'}, {'12 GB swap' if swap else 'no swap'}"
            bars = axis.bar(where, list(rates.values()), width=0.18, label=label)
            axis.bar_label(bars, [f"{rate:.1f}" if rate else "x" for rate in rates.values()],
                           fontsize=7)  # fmt: skip
        axis.set_xticks(range(len(caps)), [f"{cap:g} GB" for cap in caps])
        axis.set_title(f"{quant} weights")
        axis.set_xlabel("memory cap (x: did not serve)")
    axes[0][0].set_ylabel("tokens per second, 2 clients")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for; 0, or 2 where no cgroup can be made."""
    parser = argparse.ArgumentParser(prog="python -m bench.caps", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--seconds", type=float, default=45.0, help="load per case")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through `finally`
    has_swap = len(Path("/proc/swaps").read_text().splitlines()) > 1
    for case in cases() if not options.draw else ():
        if options.only not in case.name:
            continue
        if case.swap and not has_swap:
            _progress(f"{case.name}: left out, this machine has no swap (swap-setup.sh)")
            continue
        try:
            outcome = measure(case, options.seconds, options.cache)
        except CgroupError as error:
            _progress(str(error))
            return 2
        _progress(f"{case.name}: {outcome.ending}, {outcome.tokens_per_second:.1f} tokens/s")
        keep(case, outcome, options.results)
    if entries := read(options.results):
        draw(entries, options.picture)
        print(_table(entries).text())
    return 0


def _progress(text: str) -> None:
    print(f"caps: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
