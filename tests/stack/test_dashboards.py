"""Dashboards: generated, explained, and reading only what exists."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specops.metrics.metrics import STATES
from tests.stack import queries
from tests.stack.support import promtool, read_yaml, succeed

PANELS = queries.panels()
(SOURCE,) = read_yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"]
QUESTIONS = {
    "Is it healthy?",
    "Does speculation pay?",
    "Where does the time go?",
    "Will it fit?",
    "How is the load spread?",
}


def test_the_generator_makes_what_is_committed() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    succeed(sys.executable, "grafana/generate.py", "--check")


def test_prometheus_is_asked_no_more_often_than_it_scrapes() -> None:
    interval = read_yaml("prometheus/prometheus.yml")["global"]["scrape_interval"]
    assert SOURCE["jsonData"]["timeInterval"] == interval


def test_every_panel_has_a_unit_an_explanation_and_asks_the_chosen_instances() -> None:
    for name, panel in PANELS:
        place = f"{name} / {panel['title']}"
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], place
        assert defaults["noValue"], place
        assert len(panel["description"]) > 80, place
        assert defaults["thresholds"]["steps"][0] == {"color": "green", "value": None}, place
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {SOURCE["uid"]}, place
        for target in panel["targets"]:
            for series, matchers in queries.asked(target["expr"]).series:
                assert series in queries.OWN or ("instance", "$instance") in matchers, place


def test_a_dashboard_can_be_provisioned_for_each_question() -> None:
    boards = queries.boards().values()
    assert {board["title"] for board in boards} == QUESTIONS
    assert len({board["uid"] for board in boards}) == len(QUESTIONS)
    for board in boards:
        assert board["id"] is None
        assert board["uid"].startswith("specops-")
        assert board["links"][0]["tags"] == board["tags"] == ["specops"]
        variables = [variable["name"] for variable in board["templating"]["list"]]
        assert variables == ["model", "instance"]
        assert all("$instance" in mark["target"]["expr"] for mark in board["annotations"]["list"])
        assert "__inputs" not in board
        assert "${DS_" not in json.dumps(board)
        for key in ("title", "id"):
            values = [panel[key] for panel in board["panels"]]
            assert len(set(values)) == len(values)


def test_panels_do_not_overlap() -> None:
    for board in queries.boards().values():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            columns = range(place["x"], place["x"] + place["w"])
            cells = {(x, place["y"] + dy) for x in columns for dy in range(place["h"])}
            assert place["x"] + place["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells


def healthy_panel(title: str) -> dict[str, Any]:
    (panel,) = (panel for name, panel in PANELS if (name, panel["title"]) == ("healthy", title))
    return panel


Values = dict[str, float]


def assert_shows(title: str, cases: dict[str, tuple[Values, Values]], folder: Path) -> None:
    """In each case Prometheus has some series, and the panel shows some samples."""
    (target,) = healthy_panel(title)["targets"]
    tests = []
    for case, (series, samples) in cases.items():
        expected = {
            "expr": queries.filled(target["expr"]),
            "eval_time": "0s",
            "exp_samples": [{"labels": name, "value": n} for name, n in samples.items()],
        }
        inputs = [{"series": name, "values": str(n)} for name, n in series.items()]
        test = {"interval": "5s", "input_series": inputs, "promql_expr_test": [expected]}
        tests.append({"name": case, **test})
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump({"tests": tests}))
    promtool("test", "rules", file)


def test_the_models_state_has_its_colour(tmp_path: Path) -> None:
    colours = {"ready": "green", "failed": "red", "unreachable": "red"}
    steps = healthy_panel("Model")["fieldConfig"]["defaults"]["thresholds"]["steps"]
    colour = {
        value: [s["color"] for s in steps if s["value"] is None or value >= s["value"]][-1]
        for value in (1, 2, 3)
    }
    cases = {}
    for state in (*STATES, "unreachable"):
        (value,) = (value for value in colour if colour[value] == colours.get(state, "yellow"))
        present = STATES if state in STATES else ()  # Prometheus forgets what it cannot scrape
        series = {
            f'specops_model_state{{instance="a", state="{name}"}}': float(name == state)
            for name in present
        }
        cases[state] = (series, {f'{{state="{state}"}}': float(value)})
    assert_shows("Model", cases, tmp_path)


def test_alerts_are_named_while_they_fire(tmp_path: Path) -> None:
    pending = {'ALERTS{alertname="SwapInUse", alertstate="pending"}': 1.0}
    firing = {f'ALERTS{{alertname="{n}", alertstate="firing"}}': 1.0 for n in ("A", "B")}
    cases: dict[str, tuple[Values, Values]] = {
        "pending": (pending, {'{alertname="none"}': 0}),
        "firing": (firing, {'{alertname="A"}': 1, '{alertname="B"}': 1}),
    }
    assert_shows("Alerts, by name", cases, tmp_path)
