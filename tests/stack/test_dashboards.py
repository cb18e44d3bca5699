"""Dashboards: generated, explained, and reading only what exists."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from grafana.empty import Empty
from grafana.promql import FEW, GONE
from specops.metrics.metrics import STATES
from tests.stack import queries
from tests.stack.recorded import SCRAPE, Case, check, one, query, written
from tests.stack.support import ROOT, read_yaml

PANELS = queries.panels()
(SOURCE,) = read_yaml("grafana/provisioning/datasources/prometheus.yml")["datasources"]
TITLES = {
    "Spec-Ops: Is it healthy?",
    "Spec-Ops: Does speculation pay?",
    "Spec-Ops: Where does the time go?",
    "Spec-Ops: Will it fit?",
}


def test_every_panel_has_a_unit_an_explanation_and_asks_the_chosen_instances() -> None:
    for name, panel in PANELS:
        where = f"{name} / {panel['title']}"
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"], where
        assert len(panel["description"]) > 80, f"{where}: say what it means when it looks bad"
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}, where
        for target in panel["targets"]:
            for series, matchers in queries.asked(
                target["expr"].replace("$__interval", "15s").replace("$__to", "0")
            ).series:
                chosen = {("job", "$job"), ("instance", "$instance")} <= set(matchers)
                recorded = series.startswith("instance:")  # joined with `up` of the chosen ones
                assert chosen or recorded or series in queries.OWN, where


def test_nothing_is_filled_in_where_nothing_was_measured() -> None:
    names = {name for name, _ in queries.asked_for()}
    assert len(names) > 100
    for name, promql in [*queries.asked_for(), *queries.rule_queries()]:
        assert not re.search(r"\bor\s+(vector\(\s*\d|\d+\s*\*)", promql), name
    for name, panel in PANELS:
        where = f"{name} / {panel['title']}"
        defaults = panel["fieldConfig"]["defaults"]
        text = defaults["noValue"]
        assert text.strip(), where
        # Of a range, a panel with one figure would show the last value that there was.
        one_figure = panel["type"] in {"stat", "bargauge"}
        assert text in set(Empty), f"{where}: in which state may it be empty?"
        asks = [target.get("instant", False) for target in panel["targets"]]
        if panel["type"] == "stat" and panel["options"]["graphMode"] == "area":
            assert not any(asks), where
            assert "clock" in [target["legendFormat"] for target in panel["targets"]], where
        else:
            assert all(ask is one_figure for ask in asks), where
        if one_figure:
            assert panel["options"]["reduceOptions"]["calcs"] == ["last"]
            nothing, instead = (it["options"] for it in defaults["mappings"])
            assert instead[str(FEW)]["text"] == "few", where
            assert instead[str(GONE)] == {"text": "unreachable", "color": "red"}
            assert (nothing["match"], nothing["result"]["text"]) == ("null", text)


def test_every_dashboard_begins_with_its_figures_and_the_state() -> None:
    for name, board in queries.boards().items():
        places = {
            (panel["gridPos"]["y"], panel["gridPos"]["x"]): panel for panel in board["panels"]
        }
        first = [places[place] for place in sorted(places)]
        if name == "healthy":
            largest, first = first[:3], first[3:]
            titles = [panel["title"] for panel in largest]
            assert titles == ["Tokens per second", "Average jump length", "Latency"]
            for panel in largest:
                assert (panel["gridPos"]["w"], panel["timeFrom"]) == (8, "15m")
                assert panel["gridPos"]["h"] > first[0]["gridPos"]["h"]
        assert first[0]["title"] == "State"


def test_what_has_one_name_has_one_colour() -> None:
    colours: dict[str, set[str | None]] = {}
    times: Counter[str] = Counter()
    for _, panel in PANELS:
        if panel["type"] != "timeseries":
            continue
        known = {
            override["matcher"]["options"]: item["value"]["fixedColor"]
            for override in panel["fieldConfig"]["overrides"]
            for item in override["properties"]
            if item["id"] == "color"
        }
        for name, colour in known.items():
            colours.setdefault(name, set()).add(colour)
        legends = {target["legendFormat"] for target in panel["targets"]} - set(known)
        times.update(name for name in legends if "{{" not in name)
        dashed = {
            override["matcher"]["options"]
            for override in panel["fieldConfig"]["overrides"]
            for item in override["properties"]
            if item["id"] == "custom.lineStyle"
        }
        lines = [colour for name, colour in known.items() if name not in dashed]
        assert len(set(lines)) == len(lines), panel["title"]
        assert not lines or not [name for name in legends if "{{" not in name], panel["title"]
    assert {name: found for name, found in colours.items() if len(found) > 1} == {}
    twice = [name for name, number in times.items() if number > 1 or name in colours]
    assert twice == [], "they are on several panels: give them a colour in COLOURS (panels.py)"


def test_a_dashboard_can_be_imported_into_another_grafana() -> None:
    boards = queries.boards().values()
    assert {board["title"] for board in boards} == TITLES
    assert len({board["uid"] for board in boards}) == len(TITLES)
    for board in boards:
        assert board["id"] is None
        assert board["uid"].startswith("specops-")
        assert board["links"][0]["tags"] == board["tags"] == ["specops"]
        variables = {variable["name"]: variable for variable in board["templating"]["list"]}
        assert list(variables) == ["datasource", "job", "model", "instance"]
        assert variables["datasource"]["type"] == "datasource"
        assert variables["datasource"]["query"] == "prometheus"
        # The values before anybody chooses are what this repository provisions.
        assert variables["datasource"]["current"]["value"] == SOURCE["uid"]
        assert variables["datasource"]["current"]["text"] == SOURCE["name"]
        jobs = [job["job_name"] for job in read_yaml("prometheus/prometheus.yml")["scrape_configs"]]
        assert variables["job"]["current"]["value"] in jobs
        for variable in list(variables.values())[1:]:
            assert variable["datasource"]["uid"] == "${datasource}"
        for mark in board["annotations"]["list"]:
            assert mark["datasource"]["uid"] == "${datasource}"
        assert "__inputs" not in board
        assert "${DS_" not in json.dumps(board)
        for key in ("title", "id"):
            values = [panel[key] for panel in queries.panels_of(board)]
            assert len(set(values)) == len(values)


def test_every_mark_on_the_curves_says_what_it_is() -> None:
    for name, board in queries.boards().items():
        for mark in board["annotations"]["list"]:
            where = f"{name} / {mark['name']}"
            promql = queries.filled(mark["target"]["expr"])
            labels = re.findall(r"\{\{(\w+)\}\}", mark["titleFormat"] + mark["textFormat"])
            # At Grafana's own pace, a value a minute, a mark would begin a minute late.
            assert mark["target"]["interval"] == SOURCE["jsonData"]["timeInterval"], where
            assert mark["titleFormat"], where
            assert mark["textFormat"], where
            known = queries.labels_of(promql)
            assert set(labels) <= known, f"{where} has no {set(labels) - known}"


def test_panels_do_not_overlap() -> None:
    for board in queries.boards().values():
        for panels in [board["panels"], *(panel.get("panels", []) for panel in board["panels"])]:
            taken: set[tuple[int, int]] = set()
            for panel in panels:
                grid = panel["gridPos"]
                columns = range(grid["x"], grid["x"] + grid["w"])
                cells = {(x, grid["y"] + dy) for x in columns for dy in range(grid["h"])}
                assert grid["x"] + grid["w"] <= 24
                assert not cells & taken, panel["title"]
                taken |= cells


@pytest.mark.parametrize("mark", ["Unreachable", "Alert", "Load test"])
def test_a_mark_stands_at_the_beginning_alone(tmp_path: Path, mark: str) -> None:
    """A region in a row would tint every panel."""
    before, after = 24, 48  # scrapes
    begun: dict[str, tuple[dict[str, str], str]] = {
        "up": ({}, f"1x{before} 0x{after}"),
        "ALERTS": ({"alertstate": "firing", "alertname": "A"}, f"_x{before} 1x{after}"),
        "specops_load_test_requests_total": ({"shape": "soak"}, f"0x{before} 5+5x{after}"),
    }
    series = {written(name, ATTACHED | labels): values for name, (labels, values) in begun.items()}
    (promql,) = (
        queries.filled(one["target"]["expr"])
        for one in queries.boards()["healthy"]["annotations"]["list"]
        if one["name"] == mark
    )
    times = f"count_over_time(({promql})[{SCRAPE * (before + after - 4)}s:15s])"
    check(series, [(SCRAPE * (before + after - 2), f"max({times})", one(1))], tmp_path)


# -- What panels show: their queries and the rules, evaluated by promtool --------------------

BUSY = 24  # scrapes with traffic
COUNTER = re.compile(r"_(total|bucket|sum|count|rq|retry|success|xx)$")
# Of an idle service: a model that is ready, and what says NaN while no request decodes.
UNMEASURED = {"specops_avg_jump", "specops_draft_length", "specops_estimated_speedup"}
IDLE_GAUGES = {"specops_requests_running": 0, "specops_requests_waiting": 0}
FAILURES = "specops_callback_failures_total"  # a service that works has none


ATTACHED = {"job": "specops", "instance": "a"}
UP = written("up", ATTACHED)


def history(name: str, labels: Mapping[str, str], rest: int, *, dead: bool) -> str:
    """Two minutes of traffic, then `rest` scrapes without any, or none that succeeds."""
    ended = f" stale _x{rest}"
    if name == FAILURES:
        return f"0x{BUSY}" + (ended if dead else f" 0x{rest}")
    if COUNTER.search(name):
        return f"0+10x{BUSY}" + (ended if dead else f" {10 * BUSY}x{rest}")
    if name == "specops_model_state":
        value = int(labels["state"] == "ready")
        return f"{value}x{BUSY}" + (ended if dead else f" {value}x{rest}")
    if name == "up":
        return f"1x{BUSY} " + (f"0x{rest}" if dead else f"1x{rest}")
    if name in UNMEASURED and not dead:
        return f"2x{BUSY}" + " NaN" * rest
    return f"2x{BUSY}" + (ended if dead else f" {IDLE_GAUGES.get(name, 2)}x{rest}")


def service(rest: int, *, dead: bool) -> dict[str, str]:
    """Every series of one API."""
    return {
        written(name, ATTACHED | labels): history(name, labels, rest, dead=dead)
        for name, labels in [*queries.samples(), ("up", {})]
    }


# States in which a panel must have no value after ten minutes without a request.
RESTING = {Empty.IDLE, Empty.NO_PROMPTS, Empty.NO_DRAFTS, Empty.NO_SUGGESTIONS}
COUNTED = {"Hits and misses", "Accepted tokens, by where they were found"}  # 0 after them


def test_idle_for_ten_minutes_no_latency_no_ratio_and_no_speed_has_a_value(tmp_path: Path) -> None:
    rest = 10 * 60 // SCRAPE
    end = SCRAPE * (BUSY + rest)
    cases: list[Case] = []
    for _, panel in PANELS:
        resting = queries.empty_when(panel) in RESTING
        if resting and panel["type"] != "heatmap" and panel["title"] not in COUNTED:
            for target in queries.targets(panel):
                promql = queries.filled(target["expr"])
                if not re.search(r"burn_rate(30m|1h|6h)", promql):  # they look back further
                    cases.append((end, promql, []))
    cases += [(end, query("State", "idle"), one(1)), (end, query("State", "{{state}}"), [])]
    cases += [(end, query("Requests per second"), one(0))]
    check(service(rest, dead=False), cases, tmp_path)


def test_a_sparkline_has_a_gap_while_the_service_is_unreachable(tmp_path: Path) -> None:
    rest = 10 * 60 // SCRAPE
    end = SCRAPE * (BUSY + rest)
    curves = [panel for _, panel in PANELS if panel.get("timeFrom")]
    cases: list[Case] = []
    for target in (target for panel in curves for target in panel["targets"]):
        promql = queries.filled(target["expr"].replace("$__to", str(end * 1000)))
        outage = f"({promql})[{end - SCRAPE * BUSY - 60}s:{SCRAPE}s] @ {end - 20}"
        cases += [(end, f"count_over_time({outage})", []), (end, f"count({promql})", one(1))]
    assert len(cases) == 2 * 8
    check(service(rest, dead=True), cases, tmp_path)


def test_a_heat_map_has_each_observation_in_one_column(tmp_path: Path) -> None:
    """Ten observations in each of four scrapes, in columns three scrapes wide."""
    end, values = SCRAPE * 44, "0x20 10 20 30 40x20"
    series = {
        written("specops_latency_seconds_bucket", ATTACHED | {"le": "1.0"}): values,
        written("specops_latency_seconds_count", ATTACHED): values,
    }
    promql = query("Latency", board="latency")
    column = int(queries.VARIABLES["$__interval"].removesuffix("s"))
    check(series, [(end, f"sum_over_time(sum({promql})[{end}s:{column}s])", one(40))], tmp_path)


def test_the_state_of_the_model_has_its_colour(tmp_path: Path) -> None:
    (panel,) = (one for name, one in PANELS if (name, one["title"]) == ("healthy", "State"))
    assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["color"] == "yellow"
    colours = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
    }
    assert colours == {"ready": "green", "idle": "blue", "failed": "red", "unreachable": "red"}
    for state in STATES:
        series = {UP: "1"}
        for name in STATES:
            labels = ATTACHED | {"state": name}
            series[written("specops_model_state", labels)] = str(int(name == state))
        here = [{"labels": written("", {"state": state}), "value": 1}]
        cases = [(0, query("State", "{{state}}"), here), (0, query("State", "unreachable"), [])]
        check(series, cases, tmp_path)


@pytest.mark.parametrize("dead", [False, True])
def test_failed_callbacks_are_named_only_where_one_failed(tmp_path: Path, *, dead: bool) -> None:
    promql = query("Failed callbacks, by origin")
    rest = 2
    end, healthy = SCRAPE * (BUSY + rest), service(rest, dead=dead)
    check(healthy, [(end, promql, [])], tmp_path)
    (tick,) = (name for name in healthy if name.startswith(FAILURES) and 'where="tick"' in name)
    ends = f" stale _x{rest}" if dead else f" {10 * BUSY}x{rest}"
    rate = {"labels": '{where="tick"}', "value": 10 / SCRAPE}
    cases = [(SCRAPE * BUSY, promql, [rate]), (end, f"count({promql})", [] if dead else one(1))]
    check(healthy | {tick: f"0+10x{BUSY}{ends}"}, cases, tmp_path)


def test_alerts_are_named_while_they_fire(tmp_path: Path) -> None:
    named, none = (query("Alerts", legend) for legend in ("{{alertname}}", "none"))

    def alert(name: str, state: str) -> dict[str, str]:
        return {written("ALERTS", {"alertname": name, "alertstate": state}): "1"}

    pending = {UP: "1"} | alert("SwapInUse", "pending")
    check(pending, [(0, named, []), (0, none, one(1))], tmp_path)
    firing = [{"labels": written("", {"alertname": name}), "value": 1} for name in "AB"]
    both = {UP: "1"} | alert("A", "firing") | alert("B", "firing")
    check(both, [(0, named, firing), (0, none, [])], tmp_path)


def test_a_kill_in_the_last_hour_is_red(tmp_path: Path) -> None:
    hour = 3600 // SCRAPE
    kills = written("specops_oom_kills_total", ATTACHED)
    series = {UP: f"1x{hour + 60}", kills: f"0x10 1x{hour + 50}"}
    tile = query("Killed, last hour", board="capacity")
    named, none = (query("Alerts", legend) for legend in ("killed for memory", "none"))
    soon, later = SCRAPE * 30, SCRAPE * (hour + 30)
    cases = [(soon, f"count({tile} >= 1)", one(1)), (soon, f"count({named})", one(1))]
    cases += [(soon, none, []), (later, tile, one(0)), (later, named, [])]
    check(series, cases, tmp_path)
    panels = {(name, panel["title"]): panel["fieldConfig"] for name, panel in PANELS}
    red = {"color": "red", "value": 1}
    assert panels["capacity", "Killed, last hour"]["defaults"]["thresholds"]["steps"][-1] == red
    (colour,) = (
        override["properties"][0]["value"]["fixedColor"]
        for override in panels["healthy", "Alerts"]["overrides"]
        if override["matcher"]["options"] == "killed for memory"
    )
    assert colour == "red"


# -- only what exists ------------------------------------------------------------------------------

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
