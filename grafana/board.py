"""The shared parts of the five dashboards: state, links, variables, annotations, refresh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.builders.stat import Panel as Tile
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from panels import DATASOURCE, UNREACHABLE, words
from promql import INSTANCES, series, states

TAG = "specops"
Panels = Iterator[Any]  # builders of rows and panels, in order

STATE_COLOURS = {"ready": "green", "idle": "blue", "failed": "red", UNREACHABLE: "red"}


def board(
    uid: str, title: str, description: str, sections: Iterable[Callable[[], Panels]]
) -> Dashboard:
    """Build one dashboard; `title` is the question that it answers.

    It can be imported into another Grafana: its data source and the job are variables, with what
    Grafana is provisioned with here as their values.
    """
    made = (
        Dashboard(title)
        .uid(f"specops-{uid}")
        .description(description)
        .tags([TAG])
        .readonly()
        .refresh("5s")
        .time("now-15m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(_the_others())
        .with_variable(_datasource())
        .with_variable(_job())
        .with_variable(_model())
        .with_variable(_instance())
    )
    for annotation in _annotations():
        made.annotation(annotation)
    for section in sections:
        for item in section():
            made = made.with_row(item) if isinstance(item, Row) else made.with_panel(item)
    return made


def state(width: int = 6, *, counted: bool = False) -> Tile:
    """The first tile of every dashboard; with `counted` it says how many are in each state."""
    return words(
        "State",
        "`ready`: the model answers requests. `idle`: it would, and none came in the last minute. "
        "`unreachable`: Prometheus gets no figures from the API, so no panel has new ones; is it "
        "running? Prometheus' page /targets says why. `failed`: GET /health says why. Any other "
        "word is on its way to `ready`. Several replicas: each of their states.",
        states(),
        STATE_COLOURS,
        width=width,
        other="yellow",
        counted=counted,
    )


def _the_others() -> DashboardLink:
    return (
        DashboardLink("Questions")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(False)
        .include_vars(True)
        .keep_time(True)
        .tooltip("the other dashboards, with the same time range and variables")
    )


def _datasource() -> DatasourceVariable:
    return (
        DatasourceVariable("datasource")
        .label("Data source")
        .description("the Prometheus that scrapes the API")
        .type("prometheus")
        .current(VariableOption(selected=True, text="Prometheus", value="prometheus"))
    )


def _query(name: str, label: str, description: str, query: str) -> QueryVariable:
    return (
        QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _job() -> QueryVariable:
    return _query(
        "job", "Job", "Prometheus' name for the API", "label_values(specops_model_state, job)"
    ).current(VariableOption(selected=True, text="specops", value="specops"))


def _several(variable: QueryVariable) -> QueryVariable:
    every = VariableOption(selected=True, text=["All"], value=["$__all"])
    return variable.multi(True).include_all(True).current(every)


def _model() -> QueryVariable:
    query = 'label_values(specops_model_info{job=~"$job"}, name)'
    return _several(_query("model", "Model", "what is served", query)).all_value(".*")


def _instance() -> QueryVariable:
    # Only the instances that serve the chosen models, so the model filters every panel.
    query = 'label_values(specops_model_info{job=~"$job", name=~"$model"}, instance)'
    return _several(_query("instance", "Instance", "which API", query))


# Title and text of the marks on all curves; Grafana fills in {{label}}. The SDK does not know these
# two fields of Prometheus' annotations, so grafana/generate.py adds them.
MARKS = {
    "Unreachable": ("Unreachable: {{instance}}", "Prometheus gets no figures from this API."),
    "Alert": ("Alert: {{alertname}}", "Prometheus' page of alerts says what to do."),
    "Model became ready": ("Ready: {{instance}}", "The model became ready."),
    "Restart": ("Restart: {{instance}}", "The process was started again."),
    "Load test": ("Load test: {{shape}}", "Locust sent requests, in a load of this shape."),
}


def _annotations() -> list[AnnotationQuery]:
    ready = series("specops_model_ready_timestamp_seconds")
    began = series("process_start_time_seconds")
    load = series("specops_load_test_requests_total")
    up = f"up{{{INSTANCES}}}"
    none = f'label_replace(absent({up}), "instance", "the API", "", "")'
    found = {  # Grafana marks where the value is above 0
        "Unreachable": ("red", f"1 - {up} > 0 or {none}"),
        "Alert": ("orange", 'max by (alertname) (ALERTS{alertstate="firing"})'),
        "Model became ready": ("green", f"changes({ready}[1m]) > 0"),
        "Restart": ("red", f"changes({began}[1m]) > 0"),
        "Load test": ("blue", f"sum by (shape) (increase({load}[1m])) > 0"),
    }
    return [
        AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(True)
        .hide(False)
        .icon_color(colour)
        .expr(expr)
        for name, (colour, expr) in found.items()
    ]
