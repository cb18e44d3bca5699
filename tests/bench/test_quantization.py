"""What weights cost: the statistics are right, and every choice can be measured."""

from __future__ import annotations

import pytest

from bench import layer_stack, quantization
from bench.quantization import Measured, Quality

TITLES = list(quantization._choices())


def measured(**bits: list[float]) -> Measured:
    return Measured({title: Quality(item, 4.0, 0.5) for title, item in bits.items()}, [100, 300])


def test_bits_per_byte_weigh_documents_by_their_size() -> None:
    assert measured(fp32=[100.0, 500.0]).bits_per_byte("fp32") == 1.5


def test_a_difference_that_is_the_same_in_every_document_has_no_error() -> None:
    found = measured(fp32=[100.0, 500.0], worse=[110.0, 530.0])
    assert found.difference("worse", "fp32") == pytest.approx((0.1, 0.0))


def test_the_error_of_a_difference_is_that_of_a_mean_where_sizes_are_equal() -> None:
    bits = {"fp32": Quality([0.0] * 4, 32, 4), "x": Quality([1.0, 2.0, 3.0, 6.0], 4, 1)}
    rate, error = Measured(bits, [10] * 4).difference("x", "fp32")
    deviation = (sum((value - 3) ** 2 for value in (1, 2, 3, 6)) / 3) ** 0.5
    assert (rate, error) == pytest.approx((0.3, deviation / 2 / 10))


def test_all_blocks_and_methods_are_compared() -> None:
    assert {f"int4-{block}-{end}" for block in (32, 256) for end in ("rtn", "zp")} < set(TITLES)
    assert {"fp32", "int8-128", "int4-128", "int4-128, head int4"} < set(TITLES)


def test_a_table_gives_every_choice_its_differences() -> None:
    bits = {"fp32": [100.0, 500.0], "int4-128": [110.0, 530.0], "x": [120.0, 560.0]}
    text = quantization.table(measured(**bits)).markdown()
    assert "| x | 4.000 | 0.500 | 1.7000 | +200.00 ± 0.00 | +100.00 ± 0.00 |" in text


def test_times_are_compared_round_by_round() -> None:
    plan = layer_stack.Plan(rounds=2, widths=(1,))
    found = {"int4-128": {1: [0.001, 0.004]}, "int4-32": {1: [0.002, 0.006]}}
    assert "| int4-32 | 4.00 | 1.75 |" in layer_stack.table(found, plan).markdown()
