"""Results of a benchmark: figures with their spread, tables and charts, JSON for programs.

Each table is printed with aligned columns and saved as Markdown, so that documentation can link to
a file instead of copying figures. The JSON has the tables, too, for the HTML page.

Every figure is a median with its quartiles, never a mean: on a shared machine, one interrupted
round shifts a mean, and the result does not show it. Ratios are computed within a round, in which
all sides ran under the same conditions.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

SCHEMA_VERSION = 1
Item = TypeVar("Item")


def progress(text: str) -> None:
    """Print a line about the running benchmark to standard error."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and quartiles of `count` values."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarize values."""
        if not values:
            raise ValueError("nothing was measured")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def spread(self, digits: int = 2, scale: float = 1.0) -> str:
        """The median with its quartiles, times `scale`, such as `0.98 [0.97-0.99]`."""
        middle, low, high = (
            f"{item * scale:.{digits}f}" for item in (self.median, self.low, self.high)
        )
        return f"{middle} [{low}\N{EN DASH}{high}]"


def ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Divide round by round."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """The items rotated by `by` places, so that each item comes first in turn."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells, with a title and notes."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, str]], notes: Sequence[str] = ()) -> Table:
        """A table of rows that have the same columns, each a cell by the name of its column."""
        return cls(title, list(rows[0]), [tuple(row.values()) for row in rows], notes)

    def text(self) -> str:
        """The table with aligned columns. All columns but the first are right-aligned."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        drawn = [
            "  ".join(
                cell.rjust(width) if place else cell.ljust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        drawn.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, "", *drawn, *(f"* {note}" for note in self.notes)]) + "\n"

    def markdown(self) -> str:
        """The table as a section in Markdown."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        drawn = "\n".join(f"| {' | '.join(line)} |" for line in [self.columns, rule, *self.rows])
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join(part for part in (f"### {self.title}", drawn, notes) if part) + "\n"


@dataclass(frozen=True, slots=True)
class Chart:
    """A scatter chart as data.

    Attributes:
        title: its title.
        across, up: labels of the axes.
        points: by name, where each point is.
    """

    title: str
    across: str
    up: str
    points: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Target:
    """A target: the measured value should be at least `line`, or at most if `at_most`."""

    what: str
    line: float
    measured: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the measured value reaches the target."""
        return self.measured <= self.line if self.at_most else self.measured >= self.line


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a benchmark.

    Attributes:
        result: figures for the JSON file.
        tables: the tables.
        chart: drawn as a picture; None: there is none.
        targets: figures to judge; a missed target is no error.
        sound: False if a required property does not hold, such as equal output.
        name: name of the result files, if it differs from the benchmark's name.
    """

    result: Mapping[str, Any]
    tables: Sequence[Table]
    chart: Chart | None = None
    targets: Sequence[Target] = ()
    sound: bool = True
    name: str = ""

    @property
    def shown(self) -> list[Table]:
        """The tables, followed by a table of the targets if there are any."""
        rows = [
            (line.what, f"{'at most' if line.at_most else 'at least'} {line.line:.2f}",
             f"{line.measured:.3f}", yes(line.met))
            for line in self.targets
        ]  # fmt: skip
        targets = Table("Targets", ("what", "line", "measured", "reached"), rows)
        return [*self.tables, targets] if rows else [*self.tables]


def yes(value: bool) -> str:
    """A truth value as a word; "NO" stands out."""
    return "yes" if value else "NO"


def write(
    folder: Path, name: str, about: Mapping[str, Any], outcome: Outcome, note: str
) -> tuple[Path, Path]:
    """Write `name`.json and `name`.md, and return both paths.

    Args:
        folder: the folder, created if missing.
        name: name of the benchmark.
        about: fields at the start of the JSON, which describe the run.
        outcome: the result.
        note: note below the last table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    *tables, last = outcome.shown
    tables.append(replace(last, notes=(*last.notes, note)))
    document = {"schema_version": SCHEMA_VERSION, "benchmark": name, **about, **outcome.result}
    document |= {"targets": [asdict(line) for line in outcome.targets]}
    document |= {"tables": [asdict(table) for table in tables]}
    data, page = folder / f"{name}.json", folder / f"{name}.md"
    data.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    return data, page
