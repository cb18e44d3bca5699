"""The figures of `make files` stand on their page, and nothing different is passed over."""

from pathlib import Path

import pytest

from tests.files.__main__ import PARTS
from tests.files.report import Row, table, write_section

ROWS = [Row("a", 2000, 1990, 10, "`<|x|>`"), Row("b", 5, 4)]


def test_sums_and_differences() -> None:
    assert [row.different for row in ROWS] == [0, 1]
    text = table(ROWS)
    assert "| a | 2,000 | 1,990 | 10 | `<\\|x\\|>` |" in text
    assert text.splitlines()[-1] == "| all | 2,005 | 1,994 | 10 |  |"


def test_a_section_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("x\n<!-- a: written -->\nold\n<!-- end of a -->\ny\n")
    for _ in range(2):
        write_section("a", r"new \1" + "\n", page)
    assert page.read_text() == "x\n<!-- a: written -->\nnew \\1\n<!-- end of a -->\ny\n"
    with pytest.raises(ValueError, match="has no section b"):
        write_section("b", "", page)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_its_figures_on_the_page(name: str, tmp_path: Path) -> None:
    figures = PARTS[name].page.read_text(encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(figures, encoding="utf-8")
    write_section(name, "", page)
    assert len(page.read_text(encoding="utf-8")) < len(figures) - 100
