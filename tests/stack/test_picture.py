"""The drawing of a dashboard: it asks every query, and writes values as Grafana does."""

from __future__ import annotations

import importlib
import json
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.loopback import HOST, Handler, listening
from tests.stack import queries
from tests.stack.support import ROOT

pytest.importorskip("matplotlib")


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "grafana"))
    yield importlib.import_module("picture")
    sys.modules.pop("picture")


@pytest.mark.parametrize("path", queries.DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_is_asked_and_every_panel_drawn(path: Path, picture: ModuleType) -> None:
    asked: list[str] = []

    class Prometheus(Handler):
        """Has two series for every query, and three buckets for a histogram."""

        def do_GET(self) -> None:
            (query,) = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)["query"]
            asked.append(query)
            values = [[time.time() - second, str(second / 10)] for second in (10, 5, 0)]
            buckets = query.startswith("sum by (le)")
            names = ("0.5", "1.0", "+Inf") if buckets else ("one", "two")
            labels = [{"le" if buckets else "kind": name} for name in names]
            series = [{"metric": label, "values": values} for label in labels]
            self.reply(200, {"status": "success", "data": {"result": series}})

    board = json.loads(path.read_text())
    with listening(Prometheus) as port:
        url = f"http://{HOST}:{port}"
        figure = picture.draw(board, url, minutes=1)
        expected = [
            queries.filled(target["expr"].replace("$__rate_interval", "20s"))
            for panel in board["panels"]
            for target in panel.get("targets", [])
        ]
        assert asked == expected
        legend = [name for name, _, _ in picture.query(url, "up", "{{kind}} of {{no}}", minutes=1)]
        assert legend == ["one of ", "two of "]
    titles = {panel["title"] for panel in board["panels"] if panel["type"] != "row"}
    assert {axes.get_title(loc="left") for axes in figure.axes} - {""} == titles


Values = dict[int, float]  # by seconds before now
WHOLE = dict.fromkeys((-15, -10, -5, 0), 1.0)
BEFORE, AFTER = {-25: 1.0, -20: 1.0}, {-5: 1.0, 0: 1.0}


@pytest.mark.parametrize(
    ("series", "tops"),
    [
        (
            {"one": WHOLE, "hole": {-15: 2.0, 0: 2.0}, "three": WHOLE},
            [
                [WHOLE],
                [{-15: 3.0, -10: 1.0, -5: 1.0, 0: 3.0}],
                [{-15: 4.0, -10: 2.0, -5: 2.0, 0: 4.0}],
            ],
        ),
        (
            {"one": {-10: 1.0, -5: 2.0, 0: 3.0}, "late": {-5: 1.0, 0: 1.0}},
            [[{-10: 1.0, -5: 2.0, 0: 3.0}], [{-10: 1.0, -5: 3.0, 0: 4.0}]],
        ),
        (
            {"gap": BEFORE | AFTER, "limit": dict.fromkeys(range(-25, 5, 5), 9.0)},
            [[BEFORE, AFTER]],
        ),
    ],
    ids=["hole", "late", "gap"],
)
def test_series_are_stacked(
    series: dict[str, Values], tops: list[list[Values]], picture: ModuleType
) -> None:
    line = {"id": "custom.lineStyle", "value": {}}
    defaults = {"custom": {"stacking": {}, "fillOpacity": 60}, "unit": "s"}
    overrides = [{"matcher": {"options": "limit"}, "properties": [line]}]
    panel = {"fieldConfig": {"defaults": defaults, "overrides": overrides}}
    _, axes = picture.plt.subplots()
    found = [(n, [second / 60 for second in v], list(v.values())) for n, v in series.items()]
    picture.draw_curves(axes, panel, found)
    picture.plt.close(axes.figure)

    def top(outline: list[list[float]]) -> Values:
        highest: Values = {}
        for minute, value in outline:
            second = round(minute * 60)
            highest[second] = max(value, highest.get(second, 0.0))
        return highest

    drawn = [[top(part.vertices) for part in area.get_paths()] for area in axes.collections]
    assert drawn == tops


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
