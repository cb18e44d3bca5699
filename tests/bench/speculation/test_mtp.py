"""The benchmark of MTP blocks: a trained one has to gain, and one that guesses nothing is free."""

from __future__ import annotations

from bench.speculation import mtp
from tests.bench.speculation.runs import measured


def test_a_trained_block_must_gain_and_another_must_not_cost() -> None:
    found = {mtp.TRAINED: measured({"code": [1.09]}), mtp.RANDOM: measured({"code": [0.98]})}
    targets = mtp.outcome(found, mtp.QUICK).targets
    assert [(line.line, line.met) for line in targets] == [(1.1, False), (0.97, True)]
