"""The table of what each preset took, at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Row = dict[str, str]
_rows: list[Row] = []


@pytest.fixture(scope="session")
def tell() -> Callable[[Row], None]:
    """Puts a row into the table, whether tests pass or fail."""
    return _rows.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the table."""
    if not _rows:
        return
    terminalreporter.section("presets, from the hub to answers (seconds, MB)")
    columns = list(_rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in _rows)) for name in columns}
    for row in ({name: name for name in columns}, *_rows):
        terminalreporter.line("  ".join(row[name].rjust(widths[name]) for name in columns))
