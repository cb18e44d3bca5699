"""`python -m bench.fleet`: how many replicas a load takes, by simulation from measured times.

    python -m bench.fleet measure       serves TinyLlama's shape here with 1 to 4 clients at once
    python -m bench.fleet simulate      draws the page's table and plot from what was measured

What is assumed stands in `bench.queueing`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

from bench.machine import describe
from bench.models import CACHE, tinyllama_pair
from bench.queueing import ROUTES, Simulated, capacity, simulate
from bench.report import Table, write
from bench.server import Client, serving
from specops.config import Settings

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "sizing.png"
REPLICAS = (10, 100, 1000)
LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
SLOTS = 4
_PROMPT_WORDS, _NEW_TOKENS = 100, 64
_ROUNDS = 2
_SETTLE_SECONDS = 3.0  # until all clients are at it
_WORDS = ("class", "def", "return", "import", "value", "self", "raise", "yield", "while", "path")


# -- measured ----------------------------------------------------------------------------------


def measure(seconds: float, cache: Path) -> dict[str, list[float]]:
    """Seconds that a request takes, by the number of clients that ask one after the other.

    By Little's law from what is answered meanwhile: clients / requests per second. Two rounds, so
    that a disturbance shows.
    """
    target, draft = tinyllama_pair(_progress, "int4-128", cache)
    return served(
        Settings(
            target=str(target),
            draft=str(draft),
            slots=SLOTS,
            cache_dir=cache / "caps",
            prefix_cache="off",
        ),
        seconds,
    )


def served(settings: Settings, seconds: float) -> dict[str, list[float]]:
    """What `measure` measures, of any model."""
    found: dict[str, list[float]] = {}
    rng = random.Random(0)
    with serving(settings) as (_, client):
        client.generate(_body(rng))
        for _ in range(_ROUNDS):
            for clients in range(1, SLOTS + 1):
                taken = _serve(client, clients, seconds, rng)
                found.setdefault(str(clients), []).append(taken)
                _progress(f"{clients} clients: a request takes {taken:.2f} s")
    return found


def _serve(client: Client, clients: int, seconds: float, rng: random.Random) -> float:
    """Mean seconds of a request while so many are asking."""
    stop = threading.Event()

    def ask(seed: float) -> None:
        own, prompts = Client(client.port), random.Random(seed)
        while not stop.is_set():
            own.generate(_body(prompts))
        own.close()

    users = [threading.Thread(target=ask, args=(rng.random(),)) for _ in range(clients)]
    for user in users:
        user.start()
    stop.wait(_SETTLE_SECONDS)
    before, begin = _generated(client), time.monotonic()
    stop.wait(seconds)
    rate = (_generated(client) - before) / (time.monotonic() - begin) / _NEW_TOKENS
    stop.set()
    for user in users:
        user.join()
    return clients / rate


def _generated(client: Client) -> float:
    client.reconnect()
    return client.metric("specops_generated_tokens_total")


def _body(rng: random.Random) -> dict[str, Any]:
    prompt = " ".join(rng.choice(_WORDS) for _ in range(_PROMPT_WORDS))
    return {"prompt": prompt, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}


# -- told --------------------------------------------------------------------------------------


def table(times: Sequence[float], runs: Sequence[Simulated], machine: Mapping[str, Any]) -> Table:
    """The runs at some loads, side by side; `machine` is where the times were measured."""
    shown = [run for run in runs if run.load in (0.5, 0.8, 0.9, 1.2)]
    by_clients = ", ".join(f"{seconds:.2f}" for seconds in times)
    return Table(
        "A fleet, simulated",
        ("replicas", "load", "routing", "requests/s", "refused", "median s", "p95 s", "p99 s"),
        [
            (
                f"{run.replicas:,}",
                f"{run.load:.0%}",
                run.route,
                f"{run.requests_per_second:,.1f}",
                f"{run.refused:.1%}",
                f"{run.median:.1f}",
                f"{run.p95:.1f}",
                f"{run.p99:.1f}",
            )
            for run in shown
        ],
        notes=(
            f"one replica: {capacity(times):.3f} requests/s at most; a request of about "
            f"{_PROMPT_WORDS} words and {_NEW_TOKENS} new tokens takes {by_clients} s with 1 to "
            f"{len(times)} at once (TinyLlama-1.1B shape int4, measured)",
            f"measured on {machine['cpu']}, {machine['threads']} threads, onnxruntime "
            f"{machine['onnxruntime']}, {machine['date'][:10]}",
        ),
    )


def draw(runs: Sequence[Simulated], path: Path) -> None:
    """95th percentile and refusals by load, a line per fleet and routing."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(7.5, 6.5), sharex=True)
    colours = dict(zip(ROUTES, ("tab:blue", "tab:green", "tab:orange"), strict=True))
    styles = dict(zip(REPLICAS, (":", "--", "-"), strict=False))
    for route in ROUTES:
        for replicas in REPLICAS:
            line = [run for run in runs if (run.route, run.replicas) == (route, replicas)]
            loads = [run.load for run in line]
            how = {"color": colours[route], "linestyle": styles[replicas], "marker": "."}
            above.plot(
                loads, [run.p95 for run in line], label=f"{route}, {replicas:,} replicas", **how
            )
            below.plot(loads, [100 * run.refused for run in line], **how)
    above.set_ylabel("p95 of a request, seconds")
    above.set_yscale("log")
    above.yaxis.set_major_formatter("{x:g}")
    above.yaxis.set_minor_formatter("{x:g}")
    above.legend(fontsize=7)
    below.set_ylabel("refused, %")
    below.set_xlabel("load offered, share of what the replicas can do")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Measure or simulate; 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("action", choices=("measure", "simulate"))
    parser.add_argument("--seconds", type=float, default=14.0, help="per client count and round")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args(arguments)
    kept = options.results / "service-times.json"
    if options.action == "measure":
        found = measure(options.seconds, options.cache)
        document = {"machine": asdict(describe()), "seconds_by_clients": found}
        kept.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return 0
    measured = json.loads(kept.read_text(encoding="utf-8"))
    times = [mean(seconds) for seconds in measured["seconds_by_clients"].values()]
    runs = []
    for replicas in REPLICAS:
        for route in ROUTES:
            runs += [simulate(times, replicas, route, load) for load in LOADS]
            _progress(f"{replicas} replicas, {route}")
    shown = table(times, runs, measured["machine"])
    document = {
        "quick": False,
        "machine": measured["machine"],
        "seconds_by_clients": times,
        "runs": [asdict(run) for run in runs],
    }
    write(options.results, "sizing", document, [shown])
    draw(runs, options.picture)
    print(shown.text())
    return 0


def _progress(text: str) -> None:
    print(f"fleet: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
