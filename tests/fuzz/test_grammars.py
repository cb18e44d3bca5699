"""Hostile grammars end and stall nothing; `make fuzz ARGS="--only grammars"` tries more."""

from tests.fuzz import grammars


def test_hostile_grammars_are_refused_or_followed_within_the_limits() -> None:
    assert "25 cases" in grammars.run(25, 0, 1)
    grammars.run(1, 0, 115_332)  # with more fuel a mask takes 0.27 s before it ends
