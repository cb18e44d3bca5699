"""Damaged files are read or refused with an error of ours; `make fuzz` tries more of them."""

from pathlib import Path

import pytest

from tests.fuzz.parsers import READERS, Subject

CASES = 150


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    subject = Subject(name, tmp_path)
    read = sum(subject.run(seed) for seed in range(CASES))
    assert 0 <= read < CASES
