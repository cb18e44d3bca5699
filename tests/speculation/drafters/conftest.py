"""A simulated draft model: its text agrees with the target's in about half of all places."""

import pytest

from tests.simulated_target import SimulatedTarget, Text

DRAFT_TEXT = Text(surprise=0.3, seed=1)


@pytest.fixture
def runner() -> SimulatedTarget:
    """Stands in for the draft model's `ModelRunner`."""
    return SimulatedTarget(num_slots=4, context=256, max_tokens=32, text=DRAFT_TEXT)
