"""What dashboards and rules ask Prometheus for, and the series that the service exposes."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from grafana.empty import Empty
from specops.config import Settings
from specops.http.app import create_app
from specops.metrics.metrics import Metrics
from tests.stack.support import ROOT

DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
RULE_FILES = sorted((ROOT / "prometheus" / "rules").glob("*.yml"))
# The gateway's series, with the labels that are asked for; tests/deploy/gateway asks a running one.
CLUSTER, CLIENTS = {"envoy_cluster_name"}, {"envoy_http_conn_manager_prefix"}
GATEWAY = {
    **dict.fromkeys(
        (
            "envoy_cluster_membership_total",
            "envoy_cluster_membership_healthy",
            "envoy_cluster_upstream_rq_total",
            "envoy_cluster_upstream_rq_retry",
            "envoy_cluster_upstream_rq_retry_success",
            "envoy_cluster_outlier_detection_ejections_active",
            "envoy_cluster_upstream_rq_time_sum",
            "envoy_cluster_upstream_rq_time_count",
        ),
        CLUSTER,
    ),
    "envoy_cluster_upstream_rq_time_bucket": CLUSTER | {"le"},
    "envoy_http_downstream_rq_time_bucket": CLIENTS | {"le"},
    "envoy_http_downstream_rq_time_sum": CLIENTS,
    "envoy_http_downstream_rq_time_count": CLIENTS,
    "envoy_http_downstream_rq_xx": CLIENTS | {"envoy_response_code_class"},
}
# Series that the service does not expose: Prometheus' own and the gateway's.
OWN: dict[str, set[str]] = {"up": set(), "ALERTS": {"alertstate", "alertname"}, **GATEWAY}
ATTACHED = {"instance", "job"}  # labels that Prometheus adds to everything it scrapes
_WORDS = {"and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring"}
_WORDS |= {"group_left", "group_right", "inf", "nan"}
# Grafana's variables: the job of prometheus.yml, every model and instance, over 15 minutes.
VARIABLES = {
    **{"$__rate_interval": "20s", "$__range": "15m", "$__interval": "15s"},
    "$__to": "0",  # ms; every time is a late one
    **{"$job": "specops", "$instance": ".*", "$model": ".*"},
}
# States that a service under load is never in.
LOADED = (Empty.UNREACHABLE, Empty.NOT_READY, Empty.IDLE, Empty.NO_REQUESTS)
# Labels whose values are known only once a model is served.
OF_THE_MODEL = {("specops_model_info", "name"), ("specops_pass_cost_seconds", "size")}

# Name of a series → its labels → their values before any traffic.
Registry = dict[str, dict[str, set[str]]]


def filled(promql: str) -> str:
    """The expression with values for Grafana's variables."""
    for variable, value in VARIABLES.items():
        promql = promql.replace(variable, value)
    return promql


@cache
def boards() -> dict[str, dict[str, Any]]:
    """All dashboards by the name of their file."""
    return {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}


def panels_of(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows and panels of a dashboard, those in folded rows included."""
    return [each for panel in board["panels"] for each in (panel, *panel.get("panels", []))]


def panels() -> list[tuple[str, dict[str, Any]]]:
    """(dashboard, panel) for every panel that shows data."""
    return [
        (name, panel)
        for name, board in boards().items()
        for panel in panels_of(board)
        if panel["type"] != "row"
    ]


def targets(panel: dict[str, Any]) -> list[dict[str, Any]]:
    """What a panel asks for, without the clock that a curve is joined with."""
    return [target for target in panel["targets"] if target["legendFormat"] != "clock"]


def asked_for() -> list[tuple[str, str]]:
    """(dashboard / panel: legend, PromQL) of every query of a panel."""
    return [
        (f"{name} / {panel['title']}: {target['legendFormat']}", target["expr"])
        for name, panel in panels()
        for target in targets(panel)
    ]


def dashboard_queries() -> list[tuple[str, str]]:
    """`asked_for` with values for Grafana's variables."""
    return [(name, filled(promql)) for name, promql in asked_for()]


def empty_when(panel: dict[str, Any]) -> Empty:
    """The state in which the panel may show nothing."""
    return Empty(panel["fieldConfig"]["defaults"]["noValue"])


def words() -> set[str]:
    """Titles of the tiles that show the legends of their queries."""
    return {
        panel["title"]
        for _, panel in panels()
        if panel["type"] == "stat" and panel["options"]["graphMode"] == "none"
        if panel["options"]["textMode"] != "value"
    }


def by_panel(dashboard: str, states: Iterable[Empty] = Empty) -> dict[str, list[str]]:
    """The filled queries of each panel of a dashboard, by its title.

    Those alone that may be empty in one of these states, and in no other.
    """
    return {
        panel["title"]: [filled(target["expr"]) for target in targets(panel)]
        for name, panel in panels()
        if name == dashboard and empty_when(panel) in states
    }


def annotation_queries() -> list[tuple[str, str]]:
    """(dashboard / annotation, PromQL)."""
    return [
        (f"{name} / {mark['name']}", filled(mark["target"]["expr"]))
        for name, board in boards().items()
        for mark in board["annotations"]["list"]
    ]


@cache
def rules() -> list[dict[str, Any]]:
    """All rules of all groups."""
    return [
        rule
        for path in RULE_FILES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def recorded() -> dict[str, str]:
    """The series that recording rules make, with their expressions."""
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def rule_queries() -> list[tuple[str, str]]:
    """(name of the rule, PromQL)."""
    return [(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]


@dataclass(frozen=True)
class Asked:
    """What one expression names: series with their matchers, and labels that it groups by."""

    series: list[tuple[str, list[tuple[str, str]]]]
    grouping: set[str]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.series}


def asked(promql: str) -> Asked:
    """The names and the labels in an expression."""
    found = []
    for name, matchers in re.findall(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}", promql):
        found.append((name, re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers)))
    rest = re.sub(r"[a-zA-Z_:][\w:]*\s*\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", promql)
    lists = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"
    grouping = {word for group in re.findall(lists, rest) for word in re.findall(r"\w+", group)}
    rest = re.sub(lists, " ", rest)
    bare = re.findall(r"(?<![\w.])([a-zA-Z_:][\w:]*)(?!\s*\()(?![\w:])", rest)
    found += [(name, []) for name in bare if name.lower() not in _WORDS]
    return Asked(found, grouping)


@cache
def samples() -> list[tuple[str, dict[str, str]]]:
    """Name and labels of each series that the service exposes before any traffic."""
    metrics = Metrics()
    create_app(Settings(), metrics=metrics)  # it knows the endpoints
    return [
        (sample.name, sample.labels)
        for family in metrics.registry.collect()
        for sample in family.samples
    ]


def registry() -> Registry:
    """What the service exposes before any traffic."""
    exposed: Registry = {}
    for name, labels in samples():
        known = exposed.setdefault(name, {})
        for label, value in labels.items():
            known.setdefault(label, set()).add(value)
    return exposed


def labels_of(promql: str) -> set[str]:
    """Labels that the samples of an expression may have."""
    what, exposed = asked(promql), registry()
    return what.grouping or ATTACHED.union(*(exposed.get(name, ()) for name in what.names))


def problems(promql: str, exposed: Registry) -> list[str]:
    """What the expression asks for that does not exist: series, labels, values of labels."""
    found = []
    what = asked(promql)
    made = recorded()
    labels = set(ATTACHED)
    for name, matchers in what.series:
        if name in made:
            labels |= asked(made[name]).grouping
            continue
        if name not in exposed and name not in OWN:
            found.append(f"no series {name}")
            continue
        known = exposed.get(name, {label: set() for label in OWN.get(name, set())})
        labels |= set(known)
        for label, value in matchers:
            if label not in known and label not in ATTACHED:
                found.append(f"{name} has no label {label}")
            elif known.get(label) and (name, label) not in OF_THE_MODEL:
                absent = {v for v in value.split("|") if v not in known[label] and "*" not in v}
                found += [f"{name} has no {label}={v}" for v in sorted(absent)]
    found += [f"nothing to group by {label}" for label in sorted(what.grouping - labels)]
    return found
