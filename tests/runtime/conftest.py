"""Fixtures for tests that run several kernels."""

import pytest

from specops.runtime import kernels


@pytest.fixture(params=kernels.NAMES)
def each_kernel(request: pytest.FixtureRequest) -> str:
    """The test runs with each of this processor's kernels."""
    kernels.force(request.param)
    return str(request.param)
