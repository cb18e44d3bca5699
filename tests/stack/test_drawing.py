"""The dashboards drawn with Grafana's components, on a stand-in for Prometheus; and its checks."""

from __future__ import annotations

import copy
import importlib
import json
import math
import shutil
import struct
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts.browser import BrowserError, launched
from tests.loopback import HOST, Handler, free_port, listening
from tests.stack import queries
from tests.stack.support import ROOT, read_yaml, run

DRAW = ROOT / "grafana" / "draw"
PACKAGES = json.loads((DRAW / "package.json").read_text())["dependencies"]
END = 1_800_000_000  # Unix time at which every picture here ends, a multiple of a minute
MINUTES = 5
STEP = 5  # seconds between points: the scrape interval, as the panels are wide enough
EXEMPLARS = ("0.05", "1.0", "0.04", "0.99", "0.98", "0.03")
Series = dict[str, float | list[float]]  # labels as `name=value,…` → one value, or all in order


@pytest.fixture(scope="module")
def draw() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DRAW))
    yield importlib.import_module("draw")
    sys.path.remove(str(DRAW))
    sys.modules.pop("draw")


def test_the_components_are_of_the_grafana_that_the_stack_runs() -> None:
    image = read_yaml("compose.yaml")["services"]["grafana"]["image"]
    running = image.rpartition(":")[2].split(".")[:2]
    versions = {name: PACKAGES[f"@grafana/{name}"] for name in ("data", "schema", "ui")}
    assert {name: version.split(".")[:2] for name, version in versions.items()} == dict.fromkeys(
        versions, running
    )


def test_the_lock_file_pins_every_package_and_names_no_registry() -> None:
    lock = json.loads((DRAW / "package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert lock["packages"][""]["dependencies"] == PACKAGES
    assert [name for name, package in packages.items() if "integrity" not in package] == []
    assert "://" not in json.dumps([package.get("resolved", "") for package in packages.values()])


def test_the_drawing_knows_grafanas_scrape_interval(draw: ModuleType) -> None:
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["jsonData"]["timeInterval"] == draw.SCRAPE


@pytest.mark.parametrize(
    ("scale", "wrong"),
    [
        ({"greatest": 3.0, "max": 6.0, "unit": "short", "lines": []}, False),
        ({"greatest": 3.0, "max": 6.1, "unit": "short", "lines": []}, True),
        ({"greatest": 0.0, "max": 0.01, "unit": "percentunit", "lines": []}, False),
        ({"greatest": 0.0, "max": 100.0, "unit": "percentunit", "lines": []}, True),
        ({"greatest": 0.0, "max": 100.0, "unit": "short", "lines": []}, True),
        ({"greatest": 0.0, "max": 100.0, "unit": "short", "lines": [60.0]}, False),
        ({"greatest": 0.0, "max": 100.0, "unit": "short", "lines": [200.0]}, True),
        ({"greatest": None, "max": 100.0, "unit": "short", "lines": []}, False),
    ],
    ids=["twice", "more", "little", "shares", "counts", "a line", "a line beyond", "a gap"],
)
def test_an_axis_may_end_at_twice_what_it_shows(
    scale: dict[str, Any], wrong: bool, draw: ModuleType
) -> None:
    assert bool(draw.axis_faults([scale])) is wrong


def command(*options: object, **env: str) -> Any:
    return run(sys.executable, "grafana/draw/draw.py", *options, env=env)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    port = free_port()
    done = command("--prometheus", f"http://{HOST}:{port}", "--output", tmp_path)
    assert done.returncode == 1
    assert f"no Prometheus answers at http://{HOST}:{port}" in done.stderr
    assert "Traceback" not in done.stderr
    done = command("--output", tmp_path, "sickly")
    assert done.returncode == 2
    assert "no dashboard is called sickly" in done.stderr


def test_without_npm_it_says_what_to_install(tmp_path: Path) -> None:
    with listening(prometheus({}, [])) as port:
        url = f"http://{HOST}:{port}"
        done = command("--prometheus", url, "--output", tmp_path, PATH=str(tmp_path))
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "no node or no npm (Debian: apt-get install nodejs npm)",
    )


# -- on the real components ------------------------------------------------------------------------


def written(value: float) -> str:
    """A value as Prometheus writes it."""
    return {"nan": "NaN", "inf": "+Inf"}.get(str(value), str(value))


def prometheus(answers: dict[str, Series], asked: list[dict[str, str]]) -> type[Handler]:
    """A Prometheus that knows these queries; `asked` gets what it is asked."""

    class Prometheus(Handler):
        def do_GET(self) -> None:
            url = urllib.parse.urlparse(self.path)
            fields = dict(urllib.parse.parse_qsl(url.query))
            if url.path.endswith("/values"):
                asked.append(fields)
                self.success(["a:1", "b.c:2"])
            elif url.path.endswith("buildinfo"):
                self.success({"version": "2"})
            elif url.path.endswith("exemplars"):
                asked.append(fields)
                found = [{"labels": {}, "value": value, "timestamp": END} for value in EXEMPLARS]
                self.success([{"seriesLabels": {}, "exemplars": found}])
            elif fields["query"] not in answers:
                asked.append(fields)
                self.reply(400, {"status": "error", "error": f"unknown: {fields['query']}"})
            else:
                asked.append(fields)
                series = [self.one(labels, fields) for labels in answers[fields["query"]]]
                kind = "matrix" if "step" in fields else "vector"
                self.success({"resultType": kind, "result": series})

        def one(self, labels: str, fields: dict[str, str]) -> dict[str, Any]:
            metric = dict(pair.split("=") for pair in labels.split(",") if pair)
            values = answers[fields["query"]][labels]
            if "step" not in fields:
                return {"metric": metric, "value": [END, written(values)]}
            start, end, step = (int(float(fields[name])) for name in ("start", "end", "step"))
            times = range(start, end + 1, step)
            whole = values if isinstance(values, list) else [values] * len(times)
            points = [[at, written(value)] for at, value in zip(times, whole, strict=False)]
            return {"metric": metric, "values": points}

        def success(self, data: object) -> None:
            self.reply(200, {"status": "success", "data": data})

    return Prometheus


@pytest.fixture(scope="module")
def browser(draw: ModuleType) -> Iterator[Any]:
    """A browser, where Grafana's packages are installed: no test downloads them."""
    if shutil.which("npm") is None or not draw.installed():
        pytest.skip(
            "NOTHING WAS DRAWN: `npm ci --prefix grafana/draw` installs Grafana's components"
        )
    draw.bundled()
    try:
        with launched() as started:
            yield started
    except BrowserError as missing:
        pytest.skip(f"NOTHING WAS DRAWN: {missing}")


def panel(number: int, kind: str, expr: str, **changes: Any) -> dict[str, Any]:
    """A panel of a dashboard, one of a column."""
    target = {"refId": "A", "expr": expr, "legendFormat": "{{name}}", "range": True}
    target |= changes.pop("target", {})
    config = {"defaults": changes.pop("defaults", {}), "overrides": changes.pop("overrides", [])}
    return {
        "id": number,
        "title": f"panel {number}",
        "type": kind,
        "gridPos": {"x": 0, "y": 8 * number, "w": 12, "h": 8},
        "targets": [target],
        "options": changes.pop("options", {}),
        "fieldConfig": config,
        **changes,
    }


LEGEND = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
CURVES: dict[str, Any] = {"options": {"legend": LEGEND, "tooltip": {"mode": "multi"}}}
LAST = {"reduceOptions": {"calcs": ["lastNotNull"], "values": False}, "graphMode": "area"}
VARIABLE = {
    "name": "instance",
    "label": "Instance",
    "type": "query",
    "query": {"query": "label_values(up, instance)", "refId": "x"},
    "includeAll": True,
    "multi": True,
    "current": {"text": ["All"], "value": ["$__all"]},
}


@dataclass
class Drawn:
    """What the page reports of a dashboard, what it asked Prometheus, and the picture."""

    report: dict[str, Any]
    asked: list[dict[str, str]]
    picture: bytes


Drawer = Callable[..., Drawn]


@pytest.fixture
def drawn(draw: ModuleType, browser: Any) -> Drawer:
    """Draws panels from what a Prometheus answers; further parts of the dashboard by name."""

    def drawer(panels: list[dict[str, Any]], answers: dict[str, Series], **parts: Any) -> Drawn:
        asked: list[dict[str, str]] = []
        lists = {name: {"list": parts.get(name, [])} for name in ("annotations", "templating")}
        board = {"title": "Board", "panels": panels, **lists}
        with listening(prometheus(answers, asked)) as port:
            times = (END - MINUTES * 60, END)
            picture, report = draw.draw(browser, board, f"http://{HOST}:{port}", times)
        return Drawn(report, asked, picture)

    return drawer


@pytest.mark.e2e
def test_a_query_is_asked_as_grafana_asks_it(drawn: Drawer, draw: ModuleType) -> None:
    expr = 'rate(x{instance=~"$instance",all=~"${wide:raw}"}[$__rate_interval]) * $__interval_ms'
    whole = 'rate(x{instance=~"(a:1|b\\\\.c:2)",all=~".*"}[20s]) * 5000'
    wide = {**VARIABLE, "name": "wide", "allValue": ".*"}
    curve = [panel(0, "timeseries", expr, **CURVES)]
    found = drawn(curve, {whole: {"name=one": 1.0}}, templating=[VARIABLE, wide])
    times = {"start": str(END - MINUTES * 60), "end": str(END)}
    assert found.asked[:2] == [{"match[]": "up", **times}] * 2
    assert found.asked[2] == {"query": whole, **times, "step": str(STEP)}
    (only,) = found.report["panels"]
    assert (only["error"], only["names"]) == (None, ["one"])
    assert found.picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", found.picture[16:24])[0] == draw.WIDTH


@pytest.mark.e2e
def test_a_wide_range_has_wide_steps(drawn: Drawer) -> None:
    narrow = panel(0, "timeseries", "x", maxDataPoints=20, **CURVES)
    floored = panel(1, "timeseries", "x", target={"interval": "30s"}, **CURVES)
    found = drawn([narrow, floored], {"x": {"name=one": 1.0}})
    assert [query["step"] for query in found.asked] == ["15", "30"]


@pytest.mark.e2e
def test_scales_hold_what_is_drawn_on_them(drawn: Drawer) -> None:
    stacked = {"custom": {"stacking": {"mode": "normal", "group": "A"}}, "unit": "reqps"}
    steps = [{"value": None, "color": "green"}, {"value": 4, "color": "red"}]
    lines = {
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom": {"thresholdsStyle": {"mode": "dashed"}},
    }
    changed = {"unit": "s", "custom.axisPlacement": "right"}
    properties = [{"id": name, "value": value} for name, value in changed.items()]
    right = [{"matcher": {"id": "byName", "options": "two"}, "properties": properties}]
    panels = [
        panel(0, "timeseries", "both", defaults=stacked, **CURVES),
        panel(1, "timeseries", "both", defaults=lines, overrides=right, **CURVES),
    ]
    found = drawn(panels, {"both": {"name=one": 3.0, "name=two": 2.0}})
    sums, aside = (each["scales"] for each in found.report["panels"])
    assert [(scale["greatest"], scale["unit"]) for scale in sums] == [(5.0, "reqps")]
    assert 5 <= sums[0]["max"] <= 10
    parts = {scale["unit"]: (scale["greatest"], scale["lines"]) for scale in aside}
    assert parts == {"": (3.0, [4]), "s": (2.0, [4])}


@pytest.mark.e2e
def test_a_curve_has_a_gap_where_a_value_is_no_number(drawn: Drawer) -> None:
    curve = {"some": {"name=one": [1.0, math.nan, math.inf, 2.0]}}
    found = drawn([panel(0, "timeseries", "some", **CURVES)], curve)
    (scale,) = found.report["panels"][0]["scales"]
    assert scale["greatest"] == 2
    assert scale["max"] <= 4


@pytest.mark.e2e
def test_what_looks_wrong_is_named(drawn: Drawer, draw: ModuleType) -> None:
    many = {f"name=a series with a long name {number}": 1.0 for number in range(30)}
    mark = {"name": "Start", "enable": True, "iconColor": "red", "target": {"expr": "started"}}
    kinds = [("timeseries", name) for name in ("nothing", "many", "unknown")]
    kinds += [("piechart", "many"), ("timeseries", "one")]
    panels = [panel(n, kind, expr, **CURVES) for n, (kind, expr) in enumerate(kinds)]
    answers: dict[str, Series] = {"nothing": {"name=zero": 0.0}, "many": many}
    answers |= {"one": {"name=one": 1.0}, "started": {"shape=soak": [0, 0, 1, 1, 0, 1]}}
    found = drawn(panels, answers, annotations=[mark])
    wrong = draw.faults(found.report)
    assert wrong == [
        "Board / annotation Start has no text",
        "Board / panel 0: the axis ends at 100, the greatest value is 0 ()",
        "Board / panel 1: the legend takes 100% of the panel",
        "Board / panel 2: unknown: unknown",
        "Board / panel 3: panels of type piechart are not drawn",
    ]


@pytest.mark.e2e
def test_an_annotation_has_its_text_and_lasts_while_it_is_true(drawn: Drawer) -> None:
    mark = {
        "name": "Load test",
        "enable": True,
        "iconColor": "blue",
        "titleFormat": "Load: {{shape}}",
        "target": {"expr": "loaded"},
    }
    found = drawn(
        [panel(0, "timeseries", "one", **CURVES)],
        {"one": {"name=one": 1.0}, "loaded": {"shape=soak": [0, 1, 1, 0, 0, 1]}},
        annotations=[mark, {**mark, "name": "off", "enable": False}],
    )
    begin = END - MINUTES * 60
    assert [query["step"] for query in found.asked if query["query"] == "loaded"] == ["60"]
    events = [(event["time"] / 1000 - begin, event["text"]) for event in found.report["events"]]
    assert events == [(60, "Load: soak"), (300, "Load: soak")]


@pytest.mark.e2e
def test_exemplars_are_drawn_on_the_curve_that_asks_for_them(drawn: Drawer) -> None:
    curve = {"one": {"name=one": 1.0}}
    plain = drawn([panel(0, "timeseries", "one", **CURVES)], curve)
    asking = drawn([panel(0, "timeseries", "one", target={"exemplar": True}, **CURVES)], curve)
    begin = END - MINUTES * 60
    assert asking.asked[1:] == [{"query": "one", "start": str(begin), "end": str(END)}]
    found = [drawing.report["panels"][0]["exemplars"] for drawing in (plain, asking)]
    assert found == [[], [1.0, 0.04]]  # of those at one time what is far enough apart
    assert asking.picture != plain.picture


@pytest.mark.e2e
def test_every_kind_of_panel_shows_its_values(drawn: Drawer, draw: ModuleType) -> None:
    share = {"unit": "percentunit", "min": 0, "max": 1}
    up = {"0": {"text": "down", "color": "red"}, "1": {"text": "up"}}
    dead = {"match": "nan", "result": {"text": "unreachable"}}
    mappings = [{"type": "value", "options": up}, {"type": "special", "options": dead}]
    figure = {"target": {"instant": True, "range": False}, "defaults": {"mappings": mappings}}
    newest = {**LAST, "reduceOptions": {"calcs": ["last"], "values": False}}
    renamed = {"id": "organize", "options": {"renameByName": {"name": "Replica"}}}
    table = {"target": {"format": "table", **figure["target"]}, "transformations": [renamed]}
    text = {"mode": "markdown", "content": "see **there**"}
    # A panel's kind, its query, the rest of it, and the words that it shows.
    shown: list[tuple[str, str, dict[str, Any], str]] = [
        ("stat", "share", {"defaults": share, "options": LAST}, "25%"),
        ("stat", "none", {"defaults": {"noValue": "no traffic"}, "options": LAST}, "no traffic"),
        ("bargauge", "shares", {"defaults": share, "options": LAST}, "left 50% right 75%"),
        ("timeseries", "none", {"defaults": {"noValue": "nothing ran"}, **CURVES}, "nothing ran"),
        ("stat", "alive", {**figure, "options": {**LAST, "graphMode": "none"}}, "down"),
        ("stat", "unknown", {**figure, "options": newest}, "unreachable"),
        ("text", "none", {"options": text}, "see there"),
        ("table", "shares", table, "Replica left right"),
    ]
    panels = [panel(n, *row[:2], **copy.deepcopy(row[2])) for n, row in enumerate(shown)]
    answers: dict[str, Series] = {
        "share": {"name=one": 0.25}, "shares": {"name=left": 0.5, "name=right": 0.75}, "none": {},
        "alive": {"name=it": 0.0}, "unknown": {"name=it": math.nan},
    }  # fmt: skip
    found = drawn(panels, answers)
    assert draw.faults(found.report) == []
    for each, (*_, words) in zip(found.report["panels"], shown, strict=True):
        said = each["text"].split("\n", 1)[-1].replace("\n", "")
        assert all(word in said for word in words.split()), said


@pytest.mark.e2e
def test_a_heat_map_has_each_observation_in_one_row(drawn: Drawer, draw: ModuleType) -> None:
    buckets = {"le=0.1": 2.0, "le=1": 2.0, "le=+Inf": 5.0}
    cells = {
        "target": {"format": "heatmap", "legendFormat": "{{le}}"},
        "defaults": {"unit": "s"},
        "options": {"calculate": False, "color": {"scheme": "Oranges", "steps": 64}},
    }
    panels = [panel(0, "heatmap", "buckets", **cells)]
    panels += [panel(1, "state-timeline", "up", options={"showValue": "auto", "rowHeight": 0.9})]
    found = drawn(panels, {"buckets": buckets, "up": {"name=a": 1.0}})
    assert draw.faults(found.report) == []
    heat, timeline = found.report["panels"]
    assert heat["names"] == ["0.1", "1", "+Inf"]
    assert heat["text"].split()[-2:] == ["2", "3"]  # the least and the most of a cell
    assert timeline["names"] == ["a"]


@pytest.mark.e2e
def test_the_schema_of_grafanas_types_is_up_to_date(browser: Any, tmp_path: Path) -> None:
    made = tmp_path / "types.json"
    done = run("node", DRAW / "schema.mjs", made)
    assert done.returncode == 0, done.stderr
    kept = ROOT / "tests" / "stack" / "grafana_types.json"
    assert made.read_text() == kept.read_text()


@pytest.mark.e2e
@pytest.mark.parametrize("name", queries.boards())
def test_every_dashboard_is_drawn_where_prometheus_has_nothing(
    name: str, draw: ModuleType, browser: Any
) -> None:
    class Empty(Handler):
        def do_GET(self) -> None:
            lists = any(name in self.path for name in ("/label/", "exemplars"))
            data = [] if lists else {"resultType": "matrix", "result": []}
            self.reply(200, {"status": "success", "data": data})

    board = queries.boards()[name]
    with listening(Empty) as port:
        times = (END - 60, END)
        _, report = draw.draw(browser, board, f"http://{HOST}:{port}", times)
    assert draw.faults(report) == []
    assert all(panel["text"] for panel in report["panels"])
