"""The benchmark of MTP blocks: a trained one has to gain, and one that guesses nothing is free."""

from bench.speculation import mtp
from bench.speculation.ways import PLAIN, Config, Measured
from tests.bench.speculation.runs import ADAPTIVE, measured


def beside(**ratios: float) -> Measured:
    """How many times as fast as plain decoding each drafter was."""
    found = {name: measured({"code": [ratio]}) for name, ratio in ratios.items()}
    first = next(iter(found.values()))
    ways = {Config(name, 8, adaptive=True): one.runs[ADAPTIVE] for name, one in found.items()}
    return Measured(first.batches, {PLAIN: first.runs[PLAIN]} | ways)


def test_a_trained_block_must_gain_and_another_must_not_cost() -> None:
    found = {
        mtp.TRAINED: beside(head=1.09, suffix=2.0, cascade=1.95),
        mtp.RANDOM: beside(head=0.98, suffix=0.9, cascade=0.86),
    }
    targets = mtp.outcome(found, mtp.QUICK).targets
    assert [(line.line, line.met) for line in targets] == [
        (1.1, False), (0.97, True), (0.97, True), (0.97, False),
    ]  # fmt: skip
    assert targets[3].what == "random, cascade over suffix"
