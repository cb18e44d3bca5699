"""Tables for people, JSON for programs: one result, written in three forms.

The same table is printed with aligned columns and kept as Markdown, so that documentation can
quote a file instead of retyping figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.stats import Summary

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a title, and what a reader must know beside them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} cells under {len(self.columns)} columns: {row}")

    def noting(self, note: str) -> Table:
        """The table with one more note."""
        return replace(self, notes=(*self.notes, note))

    def text(self) -> str:
        """The table with aligned columns; all but the first are right-aligned."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.columns))]
        drawn = [_aligned(line, widths) for line in lines]
        rule = "  ".join("-" * width for width in widths)
        body = "\n".join([drawn[0], rule, *drawn[1:]])
        return "\n".join([self.title, "", body, *(f"* {note}" for note in self.notes)]) + "\n"

    def markdown(self) -> str:
        """The table in Markdown, as a section of its own."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        drawn = "\n".join(f"| {' | '.join(line)} |" for line in [self.columns, rule, *self.rows])
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join(part for part in (f"### {self.title}", drawn, notes) if part) + "\n"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join(
        [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    ).rstrip()


def spread(summary: Summary, digits: int = 2) -> str:
    """A median with its quartiles, such as `0.98 [0.97-0.99]`."""
    return (
        f"{summary.median:.{digits}f} [{summary.low:.{digits}f}\N{EN DASH}"
        f"{summary.high:.{digits}f}]"
    )


def yes(value: bool) -> str:
    """A truth value in words."""
    return "yes" if value else "NO"


def write(
    folder: Path, name: str, result: Mapping[str, Any], tables: Sequence[Table]
) -> tuple[Path, Path]:
    """Write `name`.json and `name`.md into a folder, replacing what was there.

    Args:
        folder: made where it is missing.
        name: of the benchmark.
        result: what was measured, fit for JSON.
        tables: the readable form of it.

    Returns:
        The two files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = {"schema_version": SCHEMA_VERSION, "benchmark": name, **result}
    data, page = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    return data, page
