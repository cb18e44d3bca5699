"""The queries of dashboards and rules, and the names of the series they read."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from specops.metrics import Metrics
from tests.stack.support import ROOT

DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
RULE_FILES = sorted((ROOT / "prometheus" / "rules").glob("*.yml"))


def panels() -> list[tuple[str, dict[str, Any]]]:
    """(dashboard, panel) for every panel that shows data."""
    return [
        (path.stem, panel)
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        if panel["type"] != "row"
    ]


def dashboard_queries() -> list[tuple[str, str]]:
    """(panel's title and legend, PromQL) with Grafana's variables filled in."""
    return [
        (
            f"{panel['title']}: {target['legendFormat']}",
            target["expr"].replace("$__rate_interval", "1m"),
        )
        for _, panel in panels()
        for target in panel["targets"]
    ]


def rules() -> list[dict[str, str]]:
    """All rules of all groups."""
    return [
        rule
        for path in RULE_FILES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def series_in(promql: str) -> set[str]:
    """Names of the series that an expression reads."""
    without_labels = re.sub(r"\{[^}]*\}|\b(by|without)\s*\([^)]*\)", "", promql)
    return set(re.findall(r"\b[a-z]*:?specops[a-z0-9_:]*", without_labels))


def registered_series() -> set[str]:
    """Names of all series that the service exposes, the model's state included."""
    families = Metrics().registry.collect()
    return {sample.name for family in families for sample in family.samples}
