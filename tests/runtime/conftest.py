"""Fixtures for tests that run several kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specops.runtime import kernels


@pytest.fixture
def any_kernel() -> Iterator[None]:
    """The test may force kernels; afterwards new sessions use the fastest ones again."""
    yield
    kernels.force(None)


@pytest.fixture(params=kernels.NAMES)
def each_kernel(request: pytest.FixtureRequest, any_kernel: None) -> str:
    """The test runs with each of this processor's kernels."""
    kernels.force(request.param)
    return str(request.param)
