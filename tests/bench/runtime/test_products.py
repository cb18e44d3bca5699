"""The worker multiplies weights of every type, and the table compares both checkouts' times."""

import pytest

from bench.runtime import products, products_worker
from bench.runtime.before import KERNELS, OTHER, OURS
from bench.tools.quiet import Turns
from tests.conftest import THREADS


@pytest.mark.parametrize("weights", products.WEIGHTS)
def test_a_worker_times_products_with_every_type(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_worker, "_BYTES", 1)  # one product is enough
    worker = products_worker.Products()
    worker.load(THREADS)
    for kernel in KERNELS:
        times = worker.products(kernel=kernel, weights=weights, rows=2, count=3)
        assert len(times) == 3
        assert min(times) > 0


def test_the_table_has_every_type_their_median_and_the_worst() -> None:
    plan = products.Plan({1: 1, 4: 1}, rounds=2)
    names = [f"{kernel}, {side}" for kernel in KERNELS for side in (OTHER, OURS)]
    turns, ours = Turns(), {"Q4_0": 1.0, "Q8_0": 3.0, "INT4": 1.5}
    for weights, ms in ours.items():
        for rows in (1, 4):
            times = {name: [ms] * 2 if OURS in name else [2.0] * 2 for name in names}
            turns.ms[f"{weights}, {rows}"] = times
    tables = [products._table(kernel, list(ours), turns, plan) for kernel in KERNELS]
    assert all(table.rows == tables[0].rows for table in tables)
    rows = [(row[0], row[2].partition(" ")[0]) for row in tables[0].rows]
    assert rows == [
        ("Q4_0", "0.50"), ("Q8_0", "1.50"), ("INT4", "0.75"), ("median", "0.75"), ("worst", "1.50"),
    ]  # fmt: skip
