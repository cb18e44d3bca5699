"""Odd bodies of every endpoint; `make fuzz ARGS="--only requests"` sends more."""

from pathlib import Path

from specops.http.protocols import PROTOCOLS
from tests.fuzz import requests


def test_odd_bodies_get_an_answer_or_a_word(tmp_path: Path) -> None:
    made = requests.attack(tmp_path, range(3))
    assert PROTOCOLS.prompts.keys() <= set(made.paths)
    assert made.counts[200] > 60
    assert made.counts[400] + made.counts[422] > 60
