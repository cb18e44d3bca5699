"""What weights cost: the statistics are right, and every choice can be measured."""

from __future__ import annotations

import pytest

from bench import layer_stack, quantization
from bench.quantization import Measured, Quality
from training.corpus import DEMO_DIR

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


@pytest.mark.skipif(not (DEMO_DIR / "target" / "config.json").is_file(), reason="no demo target")
def test_a_few_choices_on_a_little_text() -> None:
    plan = quantization.Plan(choices=("int4-64-zp", TITLES[-1]), documents=2, tokens=24)
    said: list[str] = []
    found = quantization.measure(plan, said.append)
    assert set(found.choices) == {"fp32", "int4-128", "int4-64-zp", TITLES[-1]}
    assert found.choices["int4-64-zp"].layer_bits == 4 + 36 / 64
    sizes = {title: item.bytes_per_weight for title, item in found.choices.items()}
    assert sizes[TITLES[-1]] < sizes["int4-128"] < sizes["int4-64-zp"] < sizes["fp32"]
    table = quantization.table(found).text()
    assert all(title in table for title in found.choices)
    assert len(said) == 4


def test_a_pass_is_timed_for_every_kind_of_weights() -> None:
    plan = layer_stack.Plan(layers=1, rounds=2, passes=1, widths=(1,))
    found = layer_stack.measure(plan, lambda text: None)
    assert len(found) == 12
    assert all(len(times[1]) == 2 and min(times[1]) > 0 for times in found.values())
    assert "int4-128-zp" in layer_stack.table(found, plan).markdown()
