"""The profile adds up: every kernel of the passes that count, and no other."""

import pytest

from bench.models import BenchModel
from bench.runtime import kernels
from specops.runtime.kernels import ATTENTION, MATMUL


def test_only_the_last_passes_count_and_shares_are_of_the_kernels_time() -> None:
    def kernel(op: str, start: int, duration: int) -> dict[str, object]:
        args = {"op_name": op}
        return {"name": f"{op}_kernel_time", "ts": start, "dur": duration, "args": args}

    def run(start: int) -> dict[str, object]:
        return {"name": "model_run", "ts": start, "dur": 50}

    events = [
        *(kernel(MATMUL, 5, 9000), run(0)),
        *(kernel(MATMUL, 101, 1000), kernel("Relu", 110, 500), run(100)),
        *(kernel(MATMUL, 201, 3000), run(200)),
    ]
    assert kernels.kernels(events, 2) == {MATMUL: 2.0, "Relu": 0.25}
    by_operator = {MATMUL: 6.0, ATTENTION: 3.0, "QuickGelu": 0.5, "Cast": 0.5}
    profile = kernels.Profile("x", 10.0, by_operator)
    assert [profile.share(group) for group in kernels.GROUPS] == [0.6, 0.3, 0.1]


def test_every_kind_of_pass_is_profiled(tiny: BenchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CONTEXT", 128)
    monkeypatch.setattr(kernels, "_PAST", 0)
    outcome = kernels.run(tiny, 2)
    assert [row[0] for row in outcome.tables[0].rows] == list(kernels.PASSES)
    for profile in outcome.result["passes"]:
        assert {MATMUL, ATTENTION} <= set(profile["kernels"])
        assert profile["milliseconds"] > 0
