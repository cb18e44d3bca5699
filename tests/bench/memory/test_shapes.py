"""Whole shapes: a byte's time is compared with TinyLlama's, and each bound is a target."""

from __future__ import annotations

from bench.memory import shapes
from bench.memory.capped import Record
from bench.memory.shapes import QUICK, Found

SERVED = Record(kv_tokens=4096, seconds=20.0, tokens=400.0, peak_anonymous=8 * 10**8)


def test_a_shape_that_reads_twice_the_bytes_may_take_twice_the_time() -> None:
    found = Found(10**9, SERVED, 1_200, [22.0, 26.4], 600, [10.0, 12.0])
    assert found.time.median == 1.1
    done = shapes.outcome({"new": found}, QUICK)
    assert [target.met for target in done.targets] == [True, True, True]
    assert done.tables[0].rows[0][:6] == ("new", "1,000", "served", "800", "4,096", "20.0")


def test_each_bound_is_a_target() -> None:
    killed = Record(ending="killed")
    found = Found(2 * 10**9 + 10**6, killed, 600, [11.6], 600, [10.0])
    done = shapes.outcome({"new": found}, QUICK)
    assert [target.met for target in done.targets] == [False, False, False]
