"""The tiny model that benchmarks run in tests."""

import pytest

from bench.models import BenchModel
from specops.config import Settings


@pytest.fixture
def tiny(tiny_settings: Settings) -> BenchModel:
    """The tiny pair of the tests as a benchmark's model."""
    return BenchModel("tiny", "Tiny model", tiny_settings)
