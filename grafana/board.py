"""The shared parts of all dashboards: title, state, links, variables, annotations, refresh."""

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

from empty import Empty
from panels import DATASOURCE, words
from promql import ANSWERS, INSTANCES, series, states

TAG = "specops"
Panels = Iterator[Any]  # builders of rows and panels, in order

STATE_COLOURS = {"ready": "green", "idle": "blue", "failed": "red", Empty.UNREACHABLE: "red"}


def board(
    uid: str, question: str, description: str, sections: Iterable[Callable[[], Panels]]
) -> Dashboard:
    """Build one dashboard, titled with the product's name and the `question` that it answers.

    It can be imported into another Grafana: its data source and the job are variables, with what
    Grafana is provisioned with here as their values.
    """
    made = (
        Dashboard(f"Spec-Ops: {question}")
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
        first, *panels = section()
        if not isinstance(first, Row):
            panels.insert(0, first)
        elif first.build().collapsed:  # its panels stand in it
            for panel in panels:
                first.with_panel(panel)
            panels = []
        if isinstance(first, Row):
            made.with_row(first)
        for panel in panels:
            made.with_panel(panel)
    return made


def folded(title: str) -> Row:
    """A row that a click opens: with most services its panels are empty."""
    return Row(title).collapsed(True)


def killed() -> str:
    """Processes of the service that the kernel killed for memory in the last hour."""
    return f"sum(increase({series('specops_oom_kills_total')}[1h]) {ANSWERS})"


def state(width: int = 3, *, title: str = "State", counted: bool = False) -> Tile:
    """How the service is; with `counted` it says how many replicas are in each state."""
    return words(
        title,
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


READY = "Ready"
# Title and text of the marks at the time axis; Grafana fills in {{label}}. The SDK does not know
# these two fields of Prometheus' annotations, so grafana/generate.py adds them.
MARKS = {
    "Unreachable": ("Unreachable: {{instance}}", "Prometheus gets no figures from this API."),
    "Alert": ("Alert: {{alertname}}", "Prometheus' page of alerts says what to do."),
    READY: ("Ready: {{instance}}", "The process was started, and its model became ready."),
    "Load test": (
        "Load test: {{shape}}",
        "Locust began to send requests, in a load of this shape.",
    ),
}


def _begins(expr: str, selector: str) -> str:
    """Where the expression has a value and had none one step before: Grafana then draws a line at
    the beginning, instead of a region that tints every panel. It reads this `selector` alone.
    """
    return f"{expr} unless {expr.replace(selector, f'{selector} offset $__interval')}"


def _annotations() -> list[AnnotationQuery]:
    ready = f"({series('specops_model_ready_timestamp_seconds')} > 0) * 1000"
    load = f"{series('specops_load_test_requests_total')}[$__rate_interval]"
    up, firing = f"up{{{INSTANCES}}}", 'ALERTS{alertstate="firing"}'
    none = f'label_replace(absent({up}), "instance", "the API", "", "")'
    found = {  # Grafana marks where the value is above 0; for READY, the time that is the value
        "Unreachable": ("red", _begins(f"(1 - {up} > 0 or {none})", up)),
        "Alert": ("orange", _begins(f"(max by (alertname) ({firing}))", firing)),
        READY: ("green", ready),
        "Load test": ("blue", _begins(f"(sum by (shape) (increase({load})) > 0)", load)),
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
