"""Compares ramps: `python -m bench.serving.knee LABEL=REPORT.json … [--output PNG]`.

It draws latency, refusals and tokens per second over the arrival rate for each report, and prints
the knees (see `loadtest/slo.py`) as a table.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

from bench.tools.report import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = (
    ("ttft_p95", "time to first token, p95 (s)"),
    ("latency_p95", "latency of the answered, p95 (s)"),
    ("refused_share", "share refused (429)"),
    ("output_tokens_per_second", "output tokens per second"),
)
COLUMNS = (
    ("knee: planned arrivals per second", "asked_per_second", ".1f"),
    ("actual", "arrived_per_second", ".1f"),
    ("tokens per second there", "output_tokens_per_second", ".0f"),
    ("first token p95 there, ms", "ttft_p95", ".0f"),
    ("latency p95 there, ms", "latency_p95", ".0f"),
)


def table(reports: dict[str, dict[str, Any]]) -> Table:
    """A row for each report: its knee, and the last stage of the ramp."""
    rows = []
    for label, report in reports.items():
        best, last, whole = report["knee"], report["stages"][-1], report["whole"]
        cells = [_cell(best[name], name, form) if best else "none" for _, name, form in COLUMNS]
        past = _cell(last["refused_share"], "", ".0%"), _cell(last["latency_p95"], "_p95", ".0f")
        rows.append((label, *cells, *past, str(whole["failed"])))
    past_it = ("past it: refused", "past it: latency p95, ms", "failed")
    return Table("Knees", ("", *(title for title, _, _ in COLUMNS), *past_it), rows)


def _cell(value: float | None, name: str, form: str) -> str:
    """A figure for people, quantiles of times in milliseconds; "-" if nothing was measured."""
    scale = 1000 if name.endswith("_p95") else 1
    return "-" if value is None else format(value * scale, form)


def draw(reports: dict[str, dict[str, Any]], output: Path) -> None:
    """One small plot per figure, one line per report, its knee as a dot."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    for place, (name, title) in zip(axes.flat, PANELS, strict=True):
        for label, report in reports.items():
            rates = [stage["arrived_per_second"] for stage in report["stages"]]
            (line,) = place.plot(rates, [stage[name] for stage in report["stages"]], label=label)
            if best := report["knee"]:
                place.plot([best["arrived_per_second"]], [best[name]], "o", color=line.get_color())
            if (limit := report["objectives"].get(name)) and name != "latency_p95":
                place.axhline(limit, color="grey", linestyle="--", linewidth=0.8)
        place.set_title(title, fontsize=10, loc="left")
        place.set_ylim(bottom=0)
        place.grid(alpha=0.3)
    for place in axes[1]:
        place.set_xlabel("arriving requests per second")
    axes[0][0].legend(title="dot: knee, dashed: objective", fontsize=9)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main() -> None:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", metavar="LABEL=REPORT.json")
    parser.add_argument("--output", type=Path, default=Path("knee.png"))
    options = parser.parse_args()
    pairs = (item.partition("=") for item in options.reports)
    reports = {label: json.loads(Path(path).read_text("utf-8")) for label, _, path in pairs}
    draw(reports, options.output)
    print(table(reports).markdown())


if __name__ == "__main__":
    main()
