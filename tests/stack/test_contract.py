"""The contract between the service and what reads its figures.

Dashboards, rules and documentation name no series, label or value that the service does not
expose, and the service exposes nothing that is not written down. A metric that is renamed in the
code fails here.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests.stack import queries
from tests.stack.support import ROOT, run

QUERIES = [
    *queries.dashboard_queries(),
    *queries.annotation_queries(),
    *queries.rule_queries(),
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXPOSED = queries.registry()


@pytest.mark.parametrize(("name", "promql"), QUERIES, ids=[name for name, _ in QUERIES])
def test_everything_asked_for_is_exposed(name: str, promql: str) -> None:
    assert queries.asked(promql).series, name
    assert queries.problems(promql, EXPOSED) == []


@pytest.mark.parametrize(
    ("promql", "problem"),
    [
        ("rate(specops_no_such_total[1m])", "no series specops_no_such_total"),
        ('specops_memory_bytes{sort="anon"}', "specops_memory_bytes has no label sort"),
        ('specops_memory_bytes{kind=~"anon|heap"}', "specops_memory_bytes has no kind=heap"),
        ("sum by (drafter) (specops_slots)", "nothing to group by drafter"),
    ],
)
def test_what_is_not_exposed_is_found(promql: str, problem: str) -> None:
    assert queries.problems(promql, EXPOSED) == [problem]


def test_every_metric_is_written_down() -> None:
    result = run(sys.executable, "scripts/metrics_page.py", "--check")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_documentation_names_no_metric_that_is_not_there(page: object) -> None:
    known = {*EXPOSED, *queries.recorded()}
    families = {re.sub(r"_(bucket|count|sum|total|info)$", "", name) for name in known}
    text = page.read_text()  # type: ignore[attr-defined]
    named = set(re.findall(r"(?<![\w./:-])(?:\w+:)?specops[_:][a-z0-9_:]+(?![\w./-])", text))
    assert {name for name in named if name not in known and name not in families} == set()


def test_every_recorded_series_is_asked_for_or_written_down() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    shown = {name for _, promql in QUERIES for name in queries.asked(promql).names}
    assert {name for name in queries.recorded() if name not in shown and name not in page} == set()
