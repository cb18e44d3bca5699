"""docs/metrics.md, the page of all metrics.

Names, types, labels and meanings come from the service's registry. The JSON of the dashboards tells
which of them show a metric.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from specops.config import Settings
from specops.http.app import create_app
from specops.metrics.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
INTRODUCTION = """\
# Metrics

Written by `make generate` from the service's registry. Everything is at `GET /metrics`
([who can read it](../SECURITY.md#in-front-of-it)); each series with known labels is there from the
start: a counter with 0, a gauge of something that was not measured yet with NaN. *On* names the
[dashboards](dashboards.md).

To a client that asks for OpenMetrics, as Prometheus does, latency and time to first token carry
exemplars: for each bucket the latest request's id, as in `X-Request-ID` and in the log.

Rates and ratios are Prometheus' work: counters here, `rate()` there. The two names that are
promised for good are `specops_latency_seconds` and `specops_avg_jump`.

"""
RECORDED = """
## Recorded by Prometheus

`prometheus/rules/specops.yml` and `opentelemetry.yml`, named `level:metric:operations`.

"""


def shown_on(boards: Mapping[Path, str]) -> dict[str, str]:
    """All expressions of each dashboard, by the name of its file."""
    found = {}
    for path, text in boards.items():
        board = json.loads(text)
        panels = [each for panel in board["panels"] for each in (panel, *panel.get("panels", []))]
        targets = [target for panel in panels for target in panel.get("targets", [])]
        targets += [mark["target"] for mark in board["annotations"]["list"]]
        expressions = [target["expr"] for target in targets]
        found[path.stem] = "\n".join(expressions)
    return found


def mentions(text: str, family: str) -> bool:
    """Whether the text names a series of the family."""
    return bool(re.search(rf"\b{family}(_total|_bucket|_count|_sum|_info)?\b(?!:)", text))


def table(boards: Mapping[Path, str]) -> str:
    """A line for each metric."""
    lines = ["| metric | type | labels | meaning | on |", "|---|---|---|---|---|"]
    pages, metrics = shown_on(boards), Metrics()
    create_app(Settings(), metrics=metrics)  # it knows the endpoints
    for family in sorted(metrics.registry.collect(), key=lambda family: family.name):
        values: dict[str, list[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le" and value not in values.setdefault(label, []):
                    values[label].append(value)
        labels = "; ".join(
            label if family.type == "info" else f"{label}: {', '.join(known)}"
            for label, known in values.items()
        )
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        titles = ", ".join(title for title, text in pages.items() if mentions(text, family.name))
        lines.append(
            f"| `{family.name}{suffix}` | {family.type} | {labels} | {family.documentation} "
            f"| {titles} |"
        )
    return "\n".join(lines) + "\n"


def recorded() -> str:
    """A line for each recording rule."""
    lines = ["| series | expression |", "|---|---|"]
    for path in sorted((ROOT / "prometheus" / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]:
            for rule in group["rules"]:
                if "record" in rule:
                    expression = " ".join(rule["expr"].split()).replace("|", "\\|")
                    lines.append(f"| `{rule['record']}` | `{expression}` |")
    return "\n".join(lines) + "\n"


def page(boards: Mapping[Path, str]) -> str:
    """The text of the page; `boards` are the dashboards as JSON, by their files."""
    return INTRODUCTION + table(boards) + RECORDED + recorded()
