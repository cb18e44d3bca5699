"""The dashboards against Grafana's published types: what Grafana would quietly ignore fails here.

`grafana_types.json` is made from the types of `@grafana/schema` by grafana/draw/schema.mjs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match

from tests.stack import queries

SCHEMA = json.loads(Path(__file__).with_name("grafana_types.json").read_text())
Panel = dict[str, Any]


def fault(kind: str, value: Any) -> str | None:
    """The first difference between a part of a dashboard and its type; None if there is none."""
    if kind not in SCHEMA["definitions"]:
        return f"{kind} is no type of panel that grafana/draw/types.ts names"
    validator = Draft7Validator({**SCHEMA, "$ref": f"#/definitions/{kind}"})
    found = best_match(validator.iter_errors(value))
    return f"{found.json_path}: {found.message}" if found else None


def overridden(panel: Panel) -> list[Panel]:
    """The panel once for each override, with the override's properties as its field config."""
    variants = []
    for override in panel.get("fieldConfig", {}).get("overrides", []):
        config: dict[str, Any] = {}
        for item in override["properties"]:
            *path, last = item["id"].split(".")
            place = config
            for name in path:
                place = place.setdefault(name, {})
            place[last] = item["value"]
        variants.append({**panel, "fieldConfig": {"defaults": config, "overrides": []}})
    return variants


def faults(panel: Panel) -> list[str]:
    """What differs from Grafana's types in a panel and in each of its overrides."""
    found = [fault(panel["type"], each) for each in [panel, *overridden(panel)]]
    return list(dict.fromkeys(each for each in found if each))


@pytest.mark.parametrize("name", queries.boards())
def test_every_dashboard_has_the_types_that_grafana_publishes(name: str) -> None:
    board = queries.boards()[name]
    assert fault("dashboard", board) is None
    assert [fault("annotation", mark) for mark in board["annotations"]["list"]] == [None] * len(
        board["annotations"]["list"]
    )
    wrong = {panel["title"]: faults(panel) for panel in board["panels"]}
    assert {title: found for title, found in wrong.items() if found} == {}


def example(kind: str) -> Panel:
    """A panel of this kind, which is valid."""
    panels = [panel for _, panel in queries.panels() if panel["type"] == kind]
    return copy.deepcopy(panels[0])


CHANGES: dict[str, tuple[str, Callable[[Panel], Any]]] = {
    "an unknown option": ("stat", lambda panel: panel["options"].update(colourMode="value")),
    "a value that no option has": (
        "stat",
        lambda panel: panel["options"].update(graphMode="areas"),
    ),
    "a number in quotes": (
        "timeseries",
        lambda panel: panel["fieldConfig"]["defaults"]["custom"].update(lineWidth="1"),
    ),
    "a drawing option that is none": (
        "timeseries",
        lambda panel: panel["fieldConfig"]["defaults"]["custom"].update(axisSoftMaximum=1),
    ),
    "a place of the legend that is none": (
        "timeseries",
        lambda panel: panel["options"]["legend"].update(placement="below"),
    ),
    "an unknown property of a field": (
        "bargauge",
        lambda panel: panel["fieldConfig"]["defaults"].update(maximum=1),
    ),
    "a colour mode that is none": (
        "timeseries",
        lambda panel: panel["fieldConfig"]["defaults"].update(color={"mode": "palette"}),
    ),
    "an override's unknown property": (
        "timeseries",
        lambda panel: panel["fieldConfig"]["overrides"].append(
            {
                "matcher": {"id": "byName", "options": "p95"},
                "properties": [{"id": "custom.lineWeight", "value": 2}],
            }
        ),
    ),
    "an override's wrong value": (
        "timeseries",
        lambda panel: panel["fieldConfig"]["overrides"].append(
            {
                "matcher": {"id": "byName", "options": "p95"},
                "properties": [{"id": "custom.lineStyle", "value": {"fill": "dashed"}}],
            }
        ),
    ),
    "a layout of cells that is none": (
        "heatmap",
        lambda panel: panel["options"]["rowsFrame"].update(layout="less"),
    ),
    "an unknown format of a query": (
        "heatmap",
        lambda panel: panel["targets"][0].update(format="histogram"),
    ),
    "a query's unknown property": (
        "timeseries",
        lambda panel: panel["targets"][0].update(legend="{{le}}"),
    ),
    "a panel's unknown property": ("stat", lambda panel: panel.update(subtitle="now")),
    "an unknown kind of panel": ("stat", lambda panel: panel.update(type="graph")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_grafana_does_not_know_is_found(change: str) -> None:
    kind, spoil = CHANGES[change]
    panel = example(kind)
    assert faults(panel) == []
    spoil(panel)
    assert len(faults(panel)) == 1


def test_an_annotation_or_a_dashboard_with_an_unknown_property_is_found() -> None:
    board = next(iter(queries.boards().values()))
    (mark, *_) = board["annotations"]["list"]
    assert fault("annotation", {**mark, "titleformat": "x"}) is not None
    assert fault("dashboard", {**board, "style": "dark"}) is not None
