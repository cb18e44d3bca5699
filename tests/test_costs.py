"""Costs are measured on the machine, kept, read again, and follow what passes take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specops.config import Settings
from specops.costs import CostCurve, calibrate
from specops.decoder import Decoder
from specops.engine import Engine

ROWS, WIDEST = 2, 11


@pytest.fixture(scope="module")
def decoder(tiny_settings: Settings) -> Decoder:
    return Engine.load(tiny_settings).scheduler.target


def test_every_size_has_a_cost(decoder: Decoder) -> None:
    curve = calibrate(decoder, decoder, widest=WIDEST, saved=None)
    assert len(curve.verify) == WIDEST + 1
    assert len(curve.decode) == decoder.cache.rows + 1
    assert curve.verify[0] == curve.decode[0] == 0
    assert min(*curve.verify[1:], *curve.decode[1:], curve.guess, curve.feed) > 0
    assert curve.decode[1] == curve.verify[1]
    assert decoder.cache.tokens == 0


def test_without_a_draft_model_guesses_cost_nothing(decoder: Decoder) -> None:
    curve = calibrate(decoder, None, widest=3, saved=None)
    assert curve.guess == curve.feed == 0
    curve.saw_guess(3, 1.0)
    assert curve.guess == 0


def test_a_curve_is_measured_once(decoder: Decoder, tmp_path: Path) -> None:
    saved = tmp_path / "costs" / "x.json"
    first = calibrate(decoder, decoder, widest=WIDEST, saved=saved)
    again = calibrate(decoder, decoder, widest=WIDEST, saved=saved)
    assert (again.verify, again.decode) == (first.verify, first.decode)
    assert (again.guess, again.feed) == (first.guess, first.feed)
    assert [item.name for item in saved.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"verify": [1]}', '{"verify": [0], "decode": [], "guess": 0}']
)
def test_a_damaged_curve_is_measured_again(decoder: Decoder, tmp_path: Path, content: str) -> None:
    saved = tmp_path / "x.json"
    saved.write_text(content)
    curve = calibrate(decoder, None, widest=3, saved=saved)
    assert json.loads(saved.read_text())["verify"] == curve.verify[1:]


def test_a_curve_of_other_sizes_is_measured_again(decoder: Decoder, tmp_path: Path) -> None:
    saved = tmp_path / "x.json"
    calibrate(decoder, None, widest=3, saved=saved)
    assert len(calibrate(decoder, None, widest=5, saved=saved).verify) == 6


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(
    decoder: Decoder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert calibrate(decoder, None, widest=3, saved=tmp_path / "file" / "x.json").verify[1] > 0


def curve() -> CostCurve:
    return CostCurve([1.0, 1.2, 1.5], [1.0, 1.1], guess=0.2)


def test_a_slow_machine_moves_all_costs_alike() -> None:
    costs = curve()
    for _ in range(1000):
        costs.saw_verify(1, 3.0)
        costs.saw_verify(2, 3.6)
        costs.saw_verify(3, 4.5)
    assert costs.drift * costs.verify[1] == pytest.approx(3.0, rel=0.02)
    assert costs.drift > 2.5
    assert costs.verify[2] / costs.verify[1] == pytest.approx(1.2, rel=0.02)
    assert costs.verify[3] / costs.verify[1] == pytest.approx(1.5, rel=0.02)


def test_one_size_that_takes_longer_gets_dearer_than_the_others() -> None:
    costs = curve()
    for _ in range(400):
        costs.saw_verify(1, 1.0)
        costs.saw_verify(2, 1.8)
    assert costs.verify[2] / costs.verify[1] == pytest.approx(1.8, rel=0.1)


def test_one_outlier_does_not_count_for_much() -> None:
    costs = curve()
    costs.saw_decode(2, 1000.0)
    assert costs.drift <= 1.2
    assert costs.decode[2] <= 1.1 * 1.05


def test_one_row_decoded_is_one_token_verified() -> None:
    costs = curve()
    costs.saw_decode(1, 1.5)
    assert costs.verify[1] == costs.decode[1] > 1
    costs.saw_verify(1, 0.5)
    assert costs.verify[1] == costs.decode[1]


def test_the_table_has_every_size_at_todays_speed() -> None:
    curve = CostCurve([2.0, 3.0], [2.0, 2.5, 4.0], guess=0.5, feed=0.1)
    curve.drift = 2.0
    assert list(curve.table()) == [
        ("verify", 1, 4.0),
        ("verify", 2, 6.0),
        ("decode", 1, 4.0),
        ("decode", 2, 5.0),
        ("decode", 3, 8.0),
        ("guess", 1, 1.0),
        ("feed", 1, 0.2),
    ]
    assert {kind for kind, *_ in CostCurve([1.0], [1.0]).table()} == {"verify", "decode"}
