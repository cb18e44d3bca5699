"""The imitated machine of these tests."""

from pathlib import Path

import pytest

from tests.system.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)
