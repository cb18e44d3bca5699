"""Whole shapes: a byte's time is compared with TinyLlama's, and each bound is a target."""

import os
from pathlib import Path

import pytest

from bench.memory import shapes
from bench.memory.capped import Record
from bench.memory.cgroup import CgroupError, cgroup
from bench.memory.shapes import QUICK, Found
from bench.models import BuildError

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


@pytest.mark.e2e
def test_a_shape_is_converted_once_under_a_cap_that_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with cgroup(f"specops-test-{os.getpid()}", memory=64 << 20):
            pass
    except CgroupError as error:
        pytest.skip(str(error))
    monkeypatch.setitem(shapes.WEIGHTS, "int4", "int4-32-rtn")
    monkeypatch.setattr(shapes, "_CONVERTER_BYTES", 32 << 20)
    with pytest.raises(BuildError, match="cannot be exported: it ended with -9"):
        shapes._converted("short-convolution", tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(shapes.WEIGHTS, "int4", "int4-32-rtn")
    peak = shapes._converted("short-convolution", tmp_path)
    assert 32 << 20 < peak < 2 * 10**9
    monkeypatch.delattr(shapes, "shape")
    assert shapes._converted("short-convolution", tmp_path) == peak
