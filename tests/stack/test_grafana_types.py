"""The dashboards against Grafana's published types: what Grafana would quietly ignore fails here.

`grafana_types/schema.json` holds the types of `@grafana/schema`; schema.mjs beside it wrote it.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from jsonschema.exceptions import best_match

from tests.stack import queries
from tests.stack.support import read_yaml

TYPES = Path(__file__).with_name("grafana_types")
SCHEMA = json.loads((TYPES / "schema.json").read_text())
Panel = dict[str, Any]


def fault(kind: str, value: Any) -> str | None:
    """The first difference between a part of a dashboard and its type; None if there is none."""
    if kind not in SCHEMA["definitions"]:
        return f"{kind} is no type of panel that grafana_types/types.ts names"
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


def test_the_types_are_of_the_grafana_that_the_stack_runs() -> None:
    image = read_yaml("compose.yaml")["services"]["grafana"]["image"]
    package = json.loads((TYPES / "package.json").read_text())
    types = package["dependencies"]["@grafana/schema"]
    assert types.split(".")[:2] == image.rpartition(":")[2].split(".")[:2]


@pytest.mark.parametrize("name", queries.boards())
def test_every_dashboard_has_the_types_that_grafana_publishes(name: str) -> None:
    board = queries.boards()[name]
    assert fault("dashboard", board) is None
    assert [fault("annotation", mark) for mark in board["annotations"]["list"]] == [None] * len(
        board["annotations"]["list"]
    )
    wrong = {panel["title"]: faults(panel) for panel in queries.panels_of(board)}
    assert {title: found for title, found in wrong.items() if found} == {}


def example(kind: str) -> Panel:
    """A panel of this kind, which is valid."""
    panels = [panel for _, panel in queries.panels() if panel["type"] == kind]
    return copy.deepcopy(panels[0])


# A kind of panel, a path in it, and what stands there. `override` is a property of an override.
CHANGES: dict[str, tuple[str, str, Any]] = {
    "an unknown option": ("stat", "options.colourMode", "value"),
    "a value that no option has": ("stat", "options.graphMode", "areas"),
    "a number in quotes": ("timeseries", "fieldConfig.defaults.custom.lineWidth", "1"),
    "a drawing option that is none": (
        "timeseries", "fieldConfig.defaults.custom.axisSoftMaximum", 1
    ),
    "a place of the legend that is none": ("timeseries", "options.legend.placement", "below"),
    "an unknown property of a field": ("bargauge", "fieldConfig.defaults.maximum", 1),
    "a colour mode that is none": ("timeseries", "fieldConfig.defaults.color", {"mode": "palette"}),
    "an override's unknown property": ("timeseries", "override", ("custom.lineWeight", 2)),
    "an override's wrong value": (
        "timeseries", "override", ("custom.lineStyle", {"fill": "dashed"})
    ),
    "a layout of cells that is none": ("heatmap", "options.rowsFrame.layout", "less"),
    "an unknown format of a query": ("heatmap", "targets.0.format", "histogram"),
    "a query's unknown property": ("timeseries", "targets.0.legend", "{{le}}"),
    "a panel's unknown property": ("stat", "subtitle", "now"),
    "an unknown kind of panel": ("stat", "type", "graph"),
}  # fmt: skip


def spoiled(panel: Panel, path: str, value: Any) -> Panel:
    """The panel with another value at a path."""
    if path == "override":
        properties = [dict(zip(("id", "value"), value, strict=True))]
        matcher = {"id": "byName", "options": "p95"}
        panel["fieldConfig"]["overrides"].append({"matcher": matcher, "properties": properties})
        return panel
    *names, last = path.split(".")
    at: Any = panel
    for name in names:
        at = at[int(name) if name.isdigit() else name]
    at[last] = value
    return panel


@pytest.mark.parametrize("change", CHANGES)
def test_what_grafana_does_not_know_is_found(change: str) -> None:
    kind, path, value = CHANGES[change]
    panel = example(kind)
    assert faults(panel) == []
    assert len(faults(spoiled(panel, path, value))) == 1


def test_an_annotation_or_a_dashboard_with_an_unknown_property_is_found() -> None:
    board = next(iter(queries.boards().values()))
    (mark, *_) = board["annotations"]["list"]
    assert fault("annotation", {**mark, "titleformat": "x"}) is not None
    assert fault("dashboard", {**board, "style": "dark"}) is not None
