"""What is not claimed of other servers' tests is listed with a reason each, and readable."""

from collections import Counter
from pathlib import Path

import pytest

from tests.suites.__main__ import HERE, SUITES

LISTS = sorted(HERE.glob("*.tsv"))


def test_every_list_is_a_suites() -> None:
    assert {path.stem for path in LISTS} <= SUITES.keys()


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_line_has_a_kind_a_test_and_a_reason(path: Path) -> None:
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    assert {len(row) for row in rows} == {3}
    assert {kind for kind, _, _ in rows} == {"left out", "differs"}
    assert all(reason.strip() for _, _, reason in rows)
    assert Counter(test for _, test, _ in rows).most_common(1)[0][1] == 1
    assert sum(kind == "differs" for kind, _, _ in rows) <= 16
