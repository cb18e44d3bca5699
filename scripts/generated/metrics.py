"""Writes docs/metrics.md, the page of all metrics.

Names, labels and meanings come from the service's registry.
"""

from collections import Counter
from pathlib import Path

import yaml
from prometheus_client import Metric

from specops.config import Settings
from specops.http.app import create_app
from specops.metrics.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
SUFFIXES = {"counter": "_total", "info": "_info", "histogram": "_bucket"}
INTRODUCTION = """\
# Metrics

Written by `make generate` from the service's registry. Everything is at `GET /metrics`
([who can read it](../SECURITY.md#in-front-of-it)). Each series with known labels exists from the
start: a counter with 0, an unmeasured gauge with NaN. [Dashboards](dashboards.md) show most of
them.

If a client accepts OpenMetrics, as Prometheus does, latency and time to first token carry
exemplars: for each bucket the latest request's id, as in `X-Request-ID` and in the log.

`_total` ends the name of a counter, `_bucket` of a histogram (with `_sum` and `_count`); the others
are gauges. Two names never change: `specops_latency_seconds` and `specops_avg_jump`. The Python
client adds its `process_*`. Where the table does not list a label's values, they are:

"""
RECORDED = """
## Recorded by Prometheus

By `prometheus/rules/specops.yml` and `opentelemetry.yml`, which have the expressions.

"""


def label_values(family: Metric) -> dict[str, str]:
    """The known values of a metric's labels, in the order of its series; ranges of numbers."""
    values: dict[str, list[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le" and value not in values.setdefault(label, []):
                values[label].append(value)
    return {
        label: f"{known[0]} to {known[-1]}" if "1 2 3" in " ".join(known) else ", ".join(known)
        for label, known in values.items()
    }


def table() -> str:
    """A line for each metric, after a list of label values that several metrics share."""
    metrics = Metrics()
    create_app(Settings(), metrics=metrics)  # registers the endpoints
    collected = sorted(metrics.registry.collect(), key=lambda family: family.name)
    rows = [(one, label_values(one)) for one in collected if not one.name.startswith("process_")]
    times = Counter(item for _, labels in rows for item in labels.items())
    common = dict(item for item, count in reversed(times.most_common()) if count > 1)
    lines = [f"- `{label}`: {known}" for label, known in sorted(common.items())]
    lines += ["", "| series | labels | meaning |", "|---|---|---|"]
    for family, found in rows:
        named = family.type == "info" or family.name == "specops_http_requests"
        cells = (
            label if named or common.get(label) == known else f"{label}: {known}"
            for label, known in found.items()
        )
        suffix = SUFFIXES.get(family.type, "")
        lines.append(f"| `{family.name}{suffix}` | {'; '.join(cells)} | {family.documentation} |")
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


def page() -> str:
    """The text of the page."""
    return INTRODUCTION + table() + RECORDED + recorded()
