"""The shared parts of the five dashboards: links, variables, annotations, refresh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from panels import DATASOURCE

TAG = "specops"
Panels = Iterator[Any]  # builders of rows and panels, in order


def board(
    uid: str, title: str, description: str, sections: Iterable[Callable[[], Panels]]
) -> Dashboard:
    """Build one dashboard; `title` is the question that it answers."""
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
        .with_variable(_model())
        .with_variable(_instance())
    )
    for annotation in _annotations():
        made.annotation(annotation)
    for section in sections:
        for item in section():
            made = made.with_row(item) if isinstance(item, Row) else made.with_panel(item)
    return made


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


def _variable(name: str, label: str, description: str, query: str) -> QueryVariable:
    return (
        QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _model() -> QueryVariable:
    query = "label_values(specops_model_info, name)"
    return _variable("model", "Model", "what is served", query).all_value(".*")


def _instance() -> QueryVariable:
    # Only the instances that serve the chosen models, so the model filters every panel.
    query = 'label_values(specops_model_info{name=~"$model"}, instance)'
    return _variable("instance", "Instance", "which API", query)


def _annotations() -> list[AnnotationQuery]:
    marks = {
        "Model became ready": (
            "green",
            'changes(specops_model_ready_timestamp_seconds{instance=~"$instance"}[1m]) > 0',
        ),
        "Restart": ("red", 'changes(process_start_time_seconds{instance=~"$instance"}[1m]) > 0'),
        "Load test": (
            "blue",
            "sum by (shape) "
            '(increase(specops_load_test_requests_total{instance=~"$instance"}[1m])) > 0',
        ),
    }
    return [
        AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(True)
        .hide(False)
        .icon_color(colour)
        .expr(expr)
        for name, (colour, expr) in marks.items()
    ]
