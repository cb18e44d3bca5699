"""How many documents were tried, equal and refused, and the pages that have the figures."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).with_name("results.md")
KEYS = Path(__file__).with_name("keys.md")


class Row(NamedTuple):
    """One file, or one kind of file.

    A refused document was refused with an error that names the reason. Whatever was tried and is
    neither equal nor refused is a failure. `note` says what was refused, and names differences that
    come from the library.
    """

    name: str
    tried: int
    equal: int
    refused: int = 0
    note: str = ""

    @property
    def different(self) -> int:
        """Documents that are read in another way."""
        return self.tried - self.equal - self.refused


def table(rows: Iterable[Row]) -> str:
    """The rows as a table of Markdown, their sums last."""
    rows = list(rows)
    total = Row("all", *(sum(row[index] for row in rows) for index in (1, 2, 3)))
    lines = ["| | tried | equal | refused | |", "|---|---:|---:|---:|---|"]
    for row in (*rows, total):
        note = row.note.replace("|", r"\|")
        lines.append(f"| {row.name} | {row.tried:,} | {row.equal:,} | {row.refused:,} | {note} |")
    return "\n".join(lines) + "\n"


def write_section(name: str, text: str, page: Path = RESULTS) -> None:
    """Replace what stands between the marks of a section in the page.

    Raises:
        ValueError: the page has no such section.
    """
    content = page.read_text(encoding="utf-8")
    marks = re.compile(rf"(<!-- {name}: [^\n]* -->\n)(.*?)(<!-- end of {name} -->\n)", re.DOTALL)
    if not marks.search(content):
        raise ValueError(f"{page} has no section {name}")
    page.write_text(marks.sub(lambda found: found[1] + text + found[3], content), encoding="utf-8")
