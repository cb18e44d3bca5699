"""docs/metrics.md, the page of all metrics.

Names, types, labels and meanings come from the service's registry. The JSON of the dashboards tells
which of them show a metric.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import yaml
from prometheus_client import Metric

from specops.config import Settings
from specops.http.app import create_app
from specops.metrics.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
INTRODUCTION = """\
# Metrics

Written by `make generate` from the service's registry. Everything is at `GET /metrics`
([who can read it](../SECURITY.md#in-front-of-it)). Each series with known labels is there from the
start: a counter with 0, a gauge that was not measured yet with NaN. *On* names the
[dashboards](dashboards.md).

To a client that asks for OpenMetrics, as Prometheus does, latency and time to first token carry
exemplars: for each bucket the latest request's id, as in `X-Request-ID` and in the log.

Counters need Prometheus' `rate()`. Two names stay for good: `specops_latency_seconds` and
`specops_avg_jump`. The Python client adds its `process_*`.

"""
RECORDED = """
## Recorded by Prometheus

By `prometheus/rules/specops.yml` and `opentelemetry.yml`, which have the expressions.

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


def label_values(family: Metric) -> dict[str, list[str]]:
    """The known values of a metric's labels, in the order of its series."""
    values: dict[str, list[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le" and value not in values.setdefault(label, []):
                values[label].append(value)
    return values


def table(boards: Mapping[Path, str]) -> str:
    """A line for each metric; values of a label that several have in common stand before them."""
    pages, metrics = shown_on(boards), Metrics()
    create_app(Settings(), metrics=metrics)  # it knows the endpoints
    collected = sorted(metrics.registry.collect(), key=lambda family: family.name)
    families = [family for family in collected if not family.name.startswith("process_")]
    found = [
        (label, tuple(known)) for one in families for label, known in label_values(one).items()
    ]
    common = {item for item, times in Counter(found).items() if times > 2}
    lines = [f"- `{label}`: {', '.join(known)}" for label, known in sorted(common)]
    lines += ["", "| metric | type | labels | meaning | on |", "|---|---|---|---|---|"]
    for family in families:
        short = family.type == "info", family.name == "specops_http_requests"
        labels = "; ".join(
            label
            if any(short) or (label, tuple(known)) in common
            else f"{label}: {', '.join(known)}"
            for label, known in label_values(family).items()
        )
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        titles = ", ".join(title for title, text in pages.items() if mentions(text, family.name))
        lines.append(
            f"| `{family.name}{suffix}` | {family.type} | {labels} | {family.documentation} "
            f"| {titles} |"
        )
    return "\n".join(lines) + "\n"


def recorded() -> str:
    """A line for each recording rule, without the expression."""
    lines = list[str]()
    for path in sorted((ROOT / "prometheus" / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]:
            for rule in group["rules"]:
                if "record" in rule:
                    lines.append(f"- `{rule['record']}`")
    return "\n".join(lines) + "\n"


def page(boards: Mapping[Path, str]) -> str:
    """The text of the page; `boards` are the dashboards as JSON, by their files."""
    return INTRODUCTION + table(boards) + RECORDED + recorded()
