"""Ten to a thousand replicas by Envoy's own algorithm, once it agrees with what was measured.

First the same traffic runs through the simulation, with as many replicas as `scale` measured and
with their addresses: Maglev's table follows from them, so every key has the same replica. If the
share of prompts from caches, the spread or the share of requests at home differ from the measured
ones, nothing is extrapolated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.models import BenchModel
from bench.scale.envoy import Maglev
from bench.scale.model import Simulation, Told
from bench.scale.traffic import PREAMBLES, talks
from bench.tools.report import Outcome, Table, progress, yes
from specops.config import ConfigError
from specops.text.tokenizer import Tokenizer

_MEASURED_AT = 3  # replicas; the clients and preambles of a case are scaled from them
_CACHED_OFF, _BUSIEST_OFF, _HOME_OFF = 0.03, 0.15, 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of replicas, and how many rounds of talks each client goes through."""

    sizes: tuple[int, ...] = (10, 30, 100, 300, 1000)
    rounds: int = 12


FULL = Plan()
QUICK = Plan((10,), 2)


def run(model: BenchModel, results: Path, plan: Plan) -> Outcome:
    """Check the simulation against the results of `scale`, then simulate more replicas."""
    path = results / "scale.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: measure first, with python -m bench scale")
    measured = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = Tokenizer.load(model.folder().path)

    @cache
    def tokens(text: str) -> int:
        return len(tokenizer.encode(text))

    progress("what was measured, simulated")
    agreed, check = _check(measured, tokens)
    if not agreed:
        return Outcome({"agreed": False}, [check], sound=False)
    cases = list(_cases(measured, plan, tokens))
    result = {"agreed": True, "cases": [asdict(case) for case in cases]}
    return Outcome(result, [check, _table(cases, plan)])


def _check(measured: Mapping[str, Any], tokens: Callable[[str], int]) -> tuple[bool, Table]:
    """Every measured run beside its simulation."""
    clients, rounds = measured["plan"]["clients"], measured["plan"]["rounds"]
    plan, rows, good = talks(clients, rounds), [], True
    for found in measured["runs"]:
        told = Simulation(Maglev(found["addresses"]), plan, tokens).told()
        requests = found["requests"]
        busiest = max(requests) * len(requests) / sum(requests)
        close = (
            abs(told.cached - found["cached"]) <= _CACHED_OFF
            and abs(told.busiest - busiest) <= _BUSIEST_OFF
            and abs(told.at_home - found["at_home"]) <= _HOME_OFF
        )
        good = good and close
        rows.append(
            (
                str(len(requests)), f"{found['cached']:.3f}", f"{told.cached:.3f}",
                f"{busiest:.2f}", f"{told.busiest:.2f}", f"{found['at_home']:.3f}",
                f"{told.at_home:.3f}", yes(close),
            )
        )  # fmt: skip
    columns = (
        "replicas", "from caches", "simulated", "busiest over mean", "simulated", "at home",
        "simulated", "agrees",
    )  # fmt: skip
    note = (
        f"the same requests, keys and addresses; agrees: within {_CACHED_OFF} of the share from "
        f"caches, {_BUSIEST_OFF} of the busiest over the mean, {_HOME_OFF} of the share at home"
    )
    return good, Table("The simulation beside what was measured", columns, rows, (note,))


@dataclass(frozen=True, slots=True)
class Case:
    """A simulation with a number of replicas and of preambles."""

    replicas: int
    preambles: int
    told: Told


def _cases(measured: Mapping[str, Any], plan: Plan, tokens: Callable[[str], int]) -> Iterator[Case]:
    each = measured["plan"]["clients"] // _MEASURED_AT
    for size in plan.sizes:
        progress(f"{size} replicas")
        gateway = Maglev([f"10.0.{n // 250}.{n % 250 + 1}:8000" for n in range(size)])
        for preambles in (PREAMBLES, max(PREAMBLES * size // _MEASURED_AT, PREAMBLES)):
            asked = talks(each * size, plan.rounds, preambles)
            yield Case(size, preambles, Simulation(gateway, asked, tokens).told())


def _table(cases: Sequence[Case], plan: Plan) -> Table:
    columns = (
        "replicas", "preambles", "from caches", "of one cache's", "busiest over mean", "at home",
        "p95, times alone",
    )  # fmt: skip
    rows = [
        (
            str(case.replicas), str(case.preambles), f"{case.told.cached:.3f}",
            f"{case.told.cached / case.told.possible:.3f}", f"{case.told.busiest:.2f}",
            f"{case.told.at_home:.3f}", f"{case.told.slowdown:.1f}",
        )
        for case in cases
    ]  # fmt: skip
    notes = (
        f"as many clients for each replica as measured at {_MEASURED_AT}, {plan.rounds} rounds of "
        f"talks each; each replica computes by itself; {PREAMBLES} preambles for all, then as many "
        f"for each replica as measured",
        "of one cache's: of the share that one cache for all would have; p95: of a request's time "
        "over the time that it takes on an idle replica",
    )
    return Table("More replicas, simulated", columns, rows, notes)
