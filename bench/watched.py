"""What being watched costs: a Prometheus that scrapes every 5 seconds and an open console.

Blocks of a few seconds under the same load in turns, in random order: nobody watches, one
Prometheus and one console do, twenty of each do. One block differs from the next by more than a
scrape costs, so the third kind is there to measure with: a twentieth of what it costs.

The load is clients that ask for whole answers, and ask again as soon as they have one: decoding is
plain and nothing is streamed, so the work is the same in every block and the load's own client
takes next to nothing of the processors that all share. Those who watch share them too, as they
would on a small machine with everything on it; what the service spends on them and what they spend
themselves is told apart by the processor time of each, measured while nobody asks.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.models import BenchModel, Progress
from bench.outcome import Outcome
from bench.prompts import Prompt
from bench.quiet import cpu_seconds, settle
from bench.report import Table
from bench.server import Client, serving
from bench.stats import interval, ratios
from bench.watcher import Process, watcher
from specops.engine import NO_DRAFTER

MANY = 20
_KINDS = {"nobody": 0, "one of each": 1, "twenty of each": MANY}
_ALONE, _ONE, _MANY = _KINDS
_WANTED = 0.99  # of the speed with nobody looking on
_SCRAPES = 100  # of which the processor time of one is the mean
_FIGURES_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of a block of each kind, for each number of clients."""

    rounds: int
    seconds: float
    new_tokens: int
    clients: tuple[int, ...] = (1, 4)


FULL = Plan(rounds=16, seconds=2.5, new_tokens=256)
QUICK = Plan(rounds=1, seconds=0.5, new_tokens=16)

# One run: per number of clients, per kind of block, tokens per second of each block.
Rates = dict[str, dict[str, list[float]]]


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time of watching, in milliseconds of one core; `page_bytes` of one scrape."""

    scrape_service: float
    scrape_watcher: float
    figures_service: float
    figures_watcher: float
    page_bytes: int


def run(
    model: BenchModel,
    prompts: Sequence[Prompt],
    plan: Plan,
    progress: Progress,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> Outcome:
    """Measure; `earlier` runs of the same plan are shown together with this one."""
    with serving(model.settings) as (pid, client), watcher(client.port) as watchers:
        rates: Rates = {}
        for clients in plan.clients:
            bodies = [_body(prompts[number], plan) for number in range(clients)]
            rates[str(clients)] = _measure(bodies, plan, pid, client.port, watchers)
            progress(f"{clients} at once: {plan.rounds} rounds")
        settle(pid)
        costs = _costs(pid, watchers)
    return outcome(model, [*earlier, {"rates": rates, "costs": asdict(costs)}], plan)


def _body(prompt: Prompt, plan: Plan) -> dict[str, Any]:
    body = {"prompt": prompt.text, "max_new_tokens": plan.new_tokens, "ignore_eos": True}
    return {**body, "drafter": NO_DRAFTER}


def _measure(
    bodies: Sequence[Mapping[str, Any]], plan: Plan, pid: int, port: int, watchers: Process
) -> dict[str, list[float]]:
    """Tokens per second of the blocks of each kind."""
    found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    _block(bodies, port, plan.seconds / 2)  # faults pages in: not counted
    for _ in range(plan.rounds):
        for kind in random.sample(list(_KINDS), len(_KINDS)):
            settle(pid, watchers.pid)
            watchers.tell("watch", _KINDS[kind])
            found[kind].append(_block(bodies, port, plan.seconds))
            watchers.tell("leave")
    return found


def _block(bodies: Sequence[Mapping[str, Any]], port: int, seconds: float) -> float:
    """Tokens per second of a client for each body, together, over about so many seconds."""
    rates = [0.0] * len(bodies)

    def ask(place: int) -> None:
        client = Client(port)
        tokens, start = 0, time.perf_counter()
        passed = 0.0
        while passed < seconds:
            tokens += client.generate(bodies[place])["generated_tokens"]
            passed = time.perf_counter() - start
        rates[place] = tokens / passed
        client.close()

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(rates):
        raise RuntimeError("a client has ended early; what it said is above")
    return sum(rates)


def _costs(pid: int, watchers: Process) -> Costs:
    """Processor time of scrapes and figures, while nobody asks for an answer."""

    def spent() -> tuple[float, float]:
        return cpu_seconds(pid), cpu_seconds(watchers.pid)

    before = spent()
    page_bytes = watchers.tell("scrape", _SCRAPES)["bytes"]
    scraped = [1000 * (now - then) / _SCRAPES for now, then in zip(spent(), before, strict=True)]
    before = spent()
    watchers.tell("watch", MANY)
    time.sleep(_FIGURES_SECONDS)  # the time over which they are counted
    looked = [1000 * (now - then) for now, then in zip(spent(), before, strict=True)]
    seen = watchers.tell("leave")  # afterwards: what an ended thread has spent is not known
    figures = [
        (whole - scrape * seen["scrapes"]) / seen["figures"]
        for whole, scrape in zip(looked, scraped, strict=True)
    ]
    return Costs(scraped[0], scraped[1], figures[0], figures[1], page_bytes)


def outcome(model: BenchModel, runs: Sequence[Mapping[str, Any]], plan: Plan) -> Outcome:
    """The table of all runs."""
    rows = []
    shares: dict[str, dict[str, tuple[float, float, float]]] = {}
    for clients in runs[0]["rates"]:
        found = {
            kind: [rate for run in runs for rate in run["rates"][clients][kind]] for kind in _KINDS
        }
        shares[clients] = {
            kind: interval(ratios(found[kind], found[_ALONE])) for kind in (_ONE, _MANY)
        }
        one, many = shares[clients][_ONE], shares[clients][_MANY]
        twentieth = sorted(100 * (1 - share) / MANY for share in many)
        rows.append(
            (
                clients,
                f"{interval(found[_ALONE])[0]:.0f}",
                _between(one, 3),
                _between(many, 3),
                _between((100 * (1 - many[0]) / MANY, twentieth[0], twentieth[-1]), 2),
                str(len(found[_ALONE])),
            )
        )
    columns = (
        *("clients", "tok/s, nobody looks on", "one of each", "twenty of each"),
        *("a twentieth of their cost, %", "rounds"),
    )
    table = Table(f"What being watched costs: {model.title}", columns, rows, _notes(runs, plan))
    result = {
        "model": model.key,
        "plan": asdict(plan),
        "wanted": _WANTED,
        "shares": shares,
        "runs": list(runs),
    }
    return Outcome(result, [table])


def _between(found: tuple[float, float, float], digits: int) -> str:
    middle, low, high = (f"{value:.{digits}f}" for value in found)
    return f"{middle} [{low}\N{EN DASH}{high}]"


def _notes(runs: Sequence[Mapping[str, Any]], plan: Plan) -> tuple[str, ...]:
    costs = runs[-1]["costs"]
    return (
        "of each: a Prometheus that scrapes every 5 s and a console that gets its figures once a "
        f"second; blocks of {plan.seconds:g} s in random order, answers of {plan.new_tokens} "
        f"tokens, plain decoding, not streamed, in {len(runs)} runs",
        "shares of the speed of the round's block with nobody looking on; medians with their 95 % "
        f"confidence intervals; wanted: {_WANTED}",
        f"processor time: a scrape ({costs['page_bytes'] / 1000:.0f} kB) takes the service "
        f"{costs['scrape_service']:.2f} ms and the watcher {costs['scrape_watcher']:.2f} ms, a "
        f"console's figures {costs['figures_service']:.2f} ms and {costs['figures_watcher']:.2f} "
        "ms; the shares hold both sides on the same cores",
    )
