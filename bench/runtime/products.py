"""Times products with weights of every type, with the kernels of two checkouts, in turns.

The weights do not fit into the last cache of most processors, so few rows wait for memory and many
for arithmetic, as in a pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from bench.runtime.before import KERNELS, OTHER, OURS, Side, checkouts
from bench.tools.quiet import Case, Turns
from bench.tools.report import Outcome, Summary, Table, progress, ratios
from specops.system.cpus import available_threads

WEIGHTS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4", "INT4", "INT8",
)  # fmt: skip
_WORKER = "bench.runtime.products_worker"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: the times of each side and round, by number of rows."""

    times: Mapping[int, int]
    rounds: int


FULL, QUICK = Plan({1: 8, 4: 8, 512: 1}, 7), Plan({1: 1, 4: 1}, 1)


def run(types: Sequence[str], other: Path, plan: Plan) -> Outcome:
    """Measure the products of each type of `WEIGHTS`."""
    turns = Turns()
    with checkouts(other, _WORKER) as workers:
        for worker in workers.values():
            worker.ask("load", threads=available_threads())
        sides = {
            _name(kernel, side): Side(workers[side], "products", {"kernel": kernel})
            for kernel, side in product(KERNELS, workers)
        }
        for weights in types:
            progress(f"products with {weights}")
            turns.measure(sides, _cases(weights, plan), plan.rounds)
    tables = [_table(kernel, types, turns, plan) for kernel in KERNELS]
    return Outcome({"other": other.name, "milliseconds": turns.ms}, tables)


def _name(kernel: str, side: str) -> str:
    return f"{kernel}, {side}"


def _title(weights: str, rows: int) -> str:
    return f"{weights}, {rows}"


def _cases(weights: str, plan: Plan) -> list[Case]:
    def case(rows: int, count: int) -> Case:
        asked = {"weights": weights, "rows": rows, "count": count}
        return Case(_title(weights, rows), lambda side: side.ask(**asked))

    return [case(rows, count) for rows, count in plan.times.items()]


def _table(kernel: str, types: Sequence[str], turns: Turns, plan: Plan) -> Table:
    table, shares = [], [list[float]() for _ in plan.times]
    for weights in types:
        row = [weights]
        for rows, kept in zip(plan.times, shares, strict=True):
            times = turns.ms[_title(weights, rows)]
            before, now = (times[_name(kernel, side)] for side in (OTHER, OURS))
            share = Summary.of(ratios(now, before))
            kept.append(share.median)
            row += [f"{Summary.of(now).median:.2f}", share.spread()]
        table.append(row)
    for name, one in (("median", median), ("worst", max)):
        table.append([name, *(cell for kept in shares for cell in ("", f"{one(kept):.2f}"))])
    columns = ["weights"]
    for rows in plan.times:
        columns += [f"{rows} rows, ms".replace("1 rows", "1 row"), "share of the other's"]
    notes = (
        f"{plan.rounds} rounds; medians with quartiles, ratios round by round",
        turns.note,
    )
    return Table(f"Products with weights against another checkout: {kernel}", columns, table, notes)
