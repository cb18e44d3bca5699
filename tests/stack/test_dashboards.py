"""Dashboards: made by the generator, explained, and reading nothing that does not exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specops.metrics.metrics import STATES
from tests.stack import queries
from tests.stack.support import ROOT, run, tool

PANELS = queries.panels()
every_panel = pytest.mark.parametrize(
    "panel",
    [panel for _, panel in PANELS],
    ids=[f"{name} / {panel['title']}" for name, panel in PANELS],
)


def test_the_generator_makes_what_is_committed() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    result = run(sys.executable, "grafana/generate.py", "--check")
    assert result.returncode == 0, result.stderr


@every_panel
def test_a_panel_has_a_unit_an_explanation_and_words_for_nothing(panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    assert defaults["noValue"]
    assert len(panel["description"]) > 80
    assert defaults["thresholds"]["steps"][0] == {"color": "green", "value": None}
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
    assert board["links"][0]["tags"] == board["tags"] == ["specops"]
    assert [variable["name"] for variable in board["templating"]["list"]] == ["model", "instance"]
    assert all("$instance" in mark["target"]["expr"] for mark in board["annotations"]["list"])
    assert board["title"].endswith("?")  # dashboards are named after the question they answer
    assert "__inputs" not in board
    assert "${DS_" not in text
    titles = [panel["title"] for panel in board["panels"]]
    assert len(set(titles)) == len(titles)
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


def test_there_is_a_dashboard_for_each_question() -> None:
    titles = {board["title"] for board in queries.boards().values()}
    assert titles == {
        "Is it healthy?",
        "Does speculation pay?",
        "Where does the time go?",
        "Will it fit?",
        "How is the load spread?",
    }
    assert len({board["uid"] for board in queries.boards().values()}) == len(titles)


def test_every_panel_asks_the_chosen_instances_alone() -> None:
    for name, panel in PANELS:
        for target in panel["targets"]:
            for series, matchers in queries.asked(target["expr"]).series:
                if series not in queries.OWN:
                    assert ("instance", "$instance") in matchers, f"{name} / {panel['title']}"


def colour(panel: dict[str, Any], value: float) -> str:
    """In which a panel's thresholds show a value."""
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    return str([s["color"] for s in steps if s["value"] is None or value >= s["value"]][-1])


def assert_shows(
    place: tuple[str, str], series: dict[str, float], samples: dict[str, float], folder: Path
) -> None:
    """With these series in Prometheus, the panel has these samples."""
    if tool("promtool") is None:
        pytest.skip("no promtool here")
    (panel,) = (panel for name, panel in PANELS if (name, panel["title"]) == place)
    (target,) = panel["targets"]
    test = {
        "interval": "5s",
        "input_series": [{"series": name, "values": str(n)} for name, n in series.items()],
        "promql_expr_test": [
            {
                "expr": queries.filled(target["expr"]),
                "eval_time": "0s",
                "exp_samples": [{"labels": name, "value": n} for name, n in samples.items()],
            }
        ],
    }
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump({"tests": [test]}))
    result = run("promtool", "test", "rules", file)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("state", "expected"),
    [(state, {"ready": "green", "failed": "red"}.get(state, "yellow")) for state in STATES]
    + [("unreachable", "red")],
)
def test_the_models_state_has_its_colour(state: str, expected: str, tmp_path: Path) -> None:
    place = ("healthy", "Model")
    (panel,) = (panel for name, panel in PANELS if (name, panel["title"]) == place)
    (value,) = (value for value in (1, 2, 3) if colour(panel, value) == expected)
    present = STATES if state in STATES else ()  # Prometheus forgets what it cannot scrape
    series = {
        f'specops_model_state{{instance="a", state="{name}"}}': float(name == state)
        for name in present
    }
    assert_shows(place, series, {f'{{state="{state}"}}': value}, tmp_path)


@pytest.mark.parametrize(
    ("series", "samples"),
    [
        ({}, {'{alertname="none"}': 0}),
        ({'ALERTS{alertname="SwapInUse", alertstate="pending"}': 1}, {'{alertname="none"}': 0}),
        (
            {f'ALERTS{{alertname="{n}", alertstate="firing"}}': 1 for n in ("A", "B")},
            {'{alertname="A"}': 1, '{alertname="B"}': 1},
        ),
    ],
)
def test_alerts_are_named_while_they_fire(
    series: dict[str, float], samples: dict[str, float], tmp_path: Path
) -> None:
    assert_shows(("healthy", "Alerts, by name"), series, samples, tmp_path)
