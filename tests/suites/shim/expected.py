"""A plugin of pytest: of another server's tests, those that this service does not claim.

SUITE_LIST names a file of lines `kind<TAB>test<TAB>reason`. The test is a file, a function or one
case of it, and stands for all in it. SUITE_WHOLE is set where all tests run: then a line without a
test is an error. See the docstring of `tests/suites/__main__.py`.
"""

import os
from pathlib import Path

import pytest


def _rows():
    path = Path(os.environ["SUITE_LIST"])
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {test: (kind, reason) for kind, test, reason in (line.split("\t") for line in lines)}


def pytest_collection_modifyitems(config, items):
    rows, used, kept, left = _rows(), set(), [], []
    for item in items:
        names = (item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0])
        name = next((name for name in names if name in rows), None)
        used.add(name)
        kind, reason = rows.get(name, ("", ""))
        if kind == "differs":
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        (left if kind == "left out" else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept
    if os.environ["SUITE_WHOLE"] and (stale := rows.keys() - used):
        raise pytest.UsageError(f"no such tests: {', '.join(sorted(stale))}")
