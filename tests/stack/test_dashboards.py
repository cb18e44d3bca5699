"""Dashboards: made by the generator, explained, and reading nothing that does not exist."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import yaml

from tests.stack import queries
from tests.stack.support import ROOT, run

PANELS = queries.panels()
every_panel = pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[panel["title"] for _, panel in PANELS]
)


def test_the_generator_makes_what_is_committed() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    result = run(sys.executable, "grafana/generate.py", "--check")
    assert result.returncode == 0, result.stderr


def test_series_are_found_in_an_expression() -> None:
    found = queries.series_in(
        'sum by (specops_label) (rate(specops_a_total{kind="specops_x"}[1m])) / specops:b:rate1m'
        " or 0 * drafter:specops_c:ratio_rate5m"
    )
    assert found == {"specops_a_total", "specops:b:rate1m", "drafter:specops_c:ratio_rate5m"}


@pytest.mark.parametrize(
    ("name", "expr"),
    [*queries.dashboard_queries(), *((rule["record"], rule["expr"]) for rule in queries.rules())],
)
def test_every_series_exists(name: str, expr: str) -> None:
    read = queries.series_in(expr)
    assert read, name
    recorded = {rule["record"] for rule in queries.rules()}
    assert read - queries.registered_series() - recorded == set()


@every_panel
def test_a_panel_has_a_unit_an_explanation_and_words_for_nothing(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    assert defaults["noValue"]
    assert len(panel["description"]) > 80
    assert panel["datasource"]["uid"] == datasource()["uid"]
    assert all(target["datasource"]["uid"] == datasource()["uid"] for target in panel["targets"])


def datasource() -> dict[str, Any]:
    path = ROOT / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
    (source,) = yaml.safe_load(path.read_text())["datasources"]
    assert isinstance(source, dict)
    return source


@pytest.mark.parametrize("path", queries.DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_can_be_provisioned(path: Any) -> None:
    text = path.read_text()
    board = json.loads(text)
    assert board["id"] is None
    assert board["uid"].startswith("specops-")
    assert board["title"].endswith("?")  # dashboards are named after the question they answer
    assert "__inputs" not in board
    assert "${DS_" not in text
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("path", queries.DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Any) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(path.read_text())["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_prometheus_is_asked_no_more_often_than_it_scrapes() -> None:
    config = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text())
    assert datasource()["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
