"""Dashboards, rules and documentation name only series, labels and values that the service exposes.

In the other direction, every metric of the service is documented. A metric that is renamed in the
code fails here.
"""

import re

import pytest

from tests.stack import queries
from tests.stack.support import ROOT

QUERIES = [*queries.dashboard_queries(), *queries.annotation_queries(), *queries.rule_queries()]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXPOSED = queries.registry()


def test_every_query_finds_what_it_asks_for() -> None:
    for name, promql in QUERIES:
        assert queries.asked(promql).series, name
        assert queries.problems(promql, EXPOSED) == [], name


@pytest.mark.parametrize(
    ("promql", "problem"),
    [
        ("rate(specops_no_such_total[1m])", "no series specops_no_such_total"),
        ('specops_memory_bytes{sort="anon"}', "specops_memory_bytes has no label sort"),
        ('specops_memory_bytes{kind=~"anon|heap"}', "specops_memory_bytes has no kind=heap"),
        ("sum by (drafter) (specops_slots)", "nothing to group by drafter"),
    ],
)
def test_a_query_that_asks_for_something_unknown_is_found(promql: str, problem: str) -> None:
    assert queries.problems(promql, EXPOSED) == [problem]


def test_every_metric_and_every_recorded_series_is_documented_or_shown() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    shown = {name for _, promql in QUERIES for name in queries.asked(promql).names}
    assert {name for name in queries.recorded() if name not in shown and name not in page} == set()


def test_the_documentation_names_only_metrics_that_exist() -> None:
    known = {*EXPOSED, *queries.recorded()}
    known |= {re.sub(r"_(bucket|count|sum|total|info)$", "", name) for name in known}
    for page in PAGES:
        pattern = r"(?<![\w./:-])(?:\w+:)?specops[_:][a-z0-9_:]+(?![\w./-])"
        assert set(re.findall(pattern, page.read_text())) - known == set(), page.name
