"""The drawing of a dashboard: every query is asked, and values read as Grafana writes them."""

from __future__ import annotations

import importlib
import json
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from tests.loopback import Handler, listening
from tests.stack import queries
from tests.stack.support import ROOT

pytest.importorskip("matplotlib")


class StandIn(Handler):
    """A Prometheus that has two series for everything, three buckets for a histogram."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        parameters = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)
        self.asked.append(parameters["query"][0])
        values = [[time.time() - second, str(second / 10)] for second in (10, 5, 0)]
        query = parameters["query"][0]
        names = ("0.5", "1.0", "+Inf") if query.startswith("sum by (le)") else ("one", "two")
        label = "le" if len(names) == 3 else "kind"
        series = [{"metric": {label: name}, "values": values} for name in names]
        self.reply(200, {"status": "success", "data": {"result": series}})


@pytest.fixture
def prometheus() -> Iterator[str]:
    StandIn.asked.clear()
    with listening(StandIn) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "grafana"))
    yield importlib.import_module("picture")
    sys.modules.pop("picture")


@pytest.mark.parametrize("path", queries.DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_is_asked_and_every_panel_drawn(
    path: Path, picture: ModuleType, prometheus: str
) -> None:
    board = json.loads(path.read_text())
    figure = picture.draw(board, prometheus, minutes=1)
    titles = {panel["title"] for panel in board["panels"] if panel["type"] != "row"}
    assert {axes.get_title(loc="left") for axes in figure.axes} - {""} == titles
    expected = [
        queries.filled(target["expr"].replace("$__rate_interval", "20s"))
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    assert expected == StandIn.asked


def test_a_series_of_another_size_has_an_axis_of_its_own(picture: ModuleType) -> None:
    board = queries.boards()["capacity"]
    (panel,) = (p for p in board["panels"] if p["title"] == "Page faults per second")
    _, axes = picture.plt.subplots()
    found = [("major", [-1.0, 0.0], [1.0, 2.0]), ("minor", [-1.0, 0.0], [1e5, 2e5])]
    picture.draw_curves(axes, panel, found)
    right = axes.figure.axes[1]
    assert axes.get_ylim()[1] < 10
    assert right.get_ylim()[1] > 1e5
    assert axes.lines[0].get_color() == picture.NAMED["red"]
    picture.plt.close(axes.figure)


Values = dict[int, float]  # by seconds before now


def stack(picture: ModuleType, *found: tuple[str, Values]) -> list[list[Values]]:
    """The tops of the areas that are drawn of these values, each in as many parts as it has."""
    panel = {
        "fieldConfig": {
            "defaults": {"custom": {"stacking": {}, "fillOpacity": 60}, "unit": "s"},
            "overrides": [
                {
                    "matcher": {"options": "limit"},
                    "properties": [{"id": "custom.lineStyle", "value": {}}],
                }
            ],
        }
    }
    _, axes = picture.plt.subplots()
    series = [
        (name, [second / 60 for second in values], list(values.values())) for name, values in found
    ]
    picture.draw_curves(axes, panel, series)
    picture.plt.close(axes.figure)
    return [[top(outline.vertices) for outline in area.get_paths()] for area in axes.collections]


def top(outline: list[list[float]]) -> Values:
    """The highest of the corners above each other."""
    highest: Values = {}
    for minute, value in outline:
        second = round(minute * 60)
        highest[second] = max(value, highest.get(second, 0.0))
    return highest


WHOLE = dict.fromkeys((-15, -10, -5, 0), 1.0)
BEFORE, AFTER = {-25: 1.0, -20: 1.0}, {-5: 1.0, 0: 1.0}


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (  # one below has no value
            {"one": WHOLE, "two": {-15: 2.0, 0: 2.0}, "three": WHOLE},
            [
                [WHOLE],
                [{-15: 3.0, -10: 1.0, -5: 1.0, 0: 3.0}],
                [{-15: 4.0, -10: 2.0, -5: 2.0, 0: 4.0}],
            ],
        ),
        (  # one begins later
            {"one": {-10: 1.0, -5: 2.0, 0: 3.0}, "two": {-5: 1.0, 0: 1.0}},
            [[{-10: 1.0, -5: 2.0, 0: 3.0}], [{-10: 1.0, -5: 3.0, 0: 4.0}]],
        ),
        (  # a gap in all
            {"one": BEFORE | AFTER, "limit": dict.fromkeys(range(-25, 5, 5), 9.0)},
            [[BEFORE, AFTER]],
        ),
    ],
    ids=["hole", "late", "gap"],
)
def test_series_are_stacked(
    series: dict[str, Values], expected: list[list[Values]], picture: ModuleType
) -> None:
    assert stack(picture, *series.items()) == expected


def test_labels_take_their_place_in_the_legend(picture: ModuleType, prometheus: str) -> None:
    found = picture.query(prometheus, "up", "{{kind}} of {{nothing}}", minutes=1)
    assert [name for name, _, _ in found] == ["one of ", "two of "]


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("s", 0.0123, "12.3 ms"),
        ("s", 1.5, "1.5 s"),
        ("bytes", 4 << 30, "4 GiB"),
        ("bytes", 3 << 20, "3 MiB"),
        ("percentunit", 0.5, "50 %"),
        ("short", 12_345.0, "12,345"),
        ("reqps", 2.0, "2 req/s"),
        ("suffix:tok/s", 1311.0, "1,311 tok/s"),
    ],
)
def test_values_are_written_in_their_unit(
    unit: str, value: float, text: str, picture: ModuleType
) -> None:
    assert picture.show(unit)(value) == text
