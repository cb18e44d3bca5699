"""Tables and charts for people, JSON for programs: one result, written in several forms.

The same table is printed with aligned columns and kept as Markdown, so that documentation can
quote a file instead of retyping figures. The JSON holds tables too, for the HTML report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.tools.stats import Summary

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


@dataclass(frozen=True, slots=True)
class Series:
    """Values over the places of a chart; None where there is none.

    `low` and `high` are the quartiles, or empty. `across` is where the points of a chart lie.
    """

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    across: Sequence[float] = ()


def series(name: str, summaries: Sequence[Summary]) -> Series:
    """Medians with their quartiles."""
    medians = [item.median for item in summaries]
    return Series(
        name, medians, [item.low for item in summaries], [item.high for item in summaries]
    )


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture as data: `kind` is `lines`, `bars` or `points`.

    Attributes:
        places: what stands below the horizontal axis, in order.
        level: a value that the eye should compare with, drawn as a horizontal line.
    """

    title: str
    kind: str
    across: str
    up: str
    places: Sequence[str]
    series: Sequence[Series]
    level: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a benchmark brings: figures that fit JSON, how to show them, and what was wanted.

    `sound` is False where what must hold did not, such as equal output. `name` is that of the
    results' files, where it is not the benchmark's.
    """

    result: Mapping[str, Any]
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    wanted: Sequence[Wanted] = ()
    sound: bool = True
    name: str = ""

    @property
    def shown(self) -> list[Table]:
        """The tables, and what was wanted, line by line."""
        return [*self.tables, _wanted_table(self.wanted)] if self.wanted else [*self.tables]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A line that a measurement should reach, or stay below, and where it came out."""

    what: str
    line: float
    measured: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether it is so."""
        return self.measured <= self.line if self.at_most else self.measured >= self.line


def _wanted_table(lines: Sequence[Wanted]) -> Table:
    rows = [
        (line.what, f"{'at most' if line.at_most else 'at least'} {line.line:.2f}",
         f"{line.measured:.3f}", yes(line.met))
        for line in lines
    ]  # fmt: skip
    return Table("Wanted", ("what", "line", "measured", "reached"), rows)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join(
        [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    ).rstrip()


def spread(summary: Summary, digits: int = 2) -> str:
    """A median with its quartiles, such as `0.98 [0.97-0.99]`."""
    middle, low, high = (
        f"{item:.{digits}f}" for item in (summary.median, summary.low, summary.high)
    )
    return f"{middle} [{low}\N{EN DASH}{high}]"


def yes(value: bool) -> str:
    """A truth value in words."""
    return "yes" if value else "NO"


def write(
    folder: Path, name: str, about: Mapping[str, Any], outcome: Outcome, note: str
) -> tuple[Path, Path]:
    """Write `name`.json and `name`.md into a folder, replacing what was there.

    `about` is what the JSON says of the run; the last table gets the note. Returns the two files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    *tables, last = outcome.shown
    tables.append(replace(last, notes=(*last.notes, note)))
    document = {"schema_version": SCHEMA_VERSION, "benchmark": name, **about, **outcome.result}
    document |= {"wanted": [asdict(line) for line in outcome.wanted]}
    document |= {"tables": [asdict(table) for table in tables]}
    data, page = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    return data, page
