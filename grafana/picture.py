"""Draws a dashboard as a picture from a real Prometheus, for the README and without Grafana.

    python grafana/picture.py [--dashboard healthy] [--prometheus URL] [--minutes 10] [--output PNG]

The panels, their places, queries and units come from the generated JSON. Only matplotlib draws
them, and the picture says so.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

FOLDER = Path(__file__).parent
STEP = 5  # seconds, as often as Prometheus scrapes
# Grafana's variables: at this step, for all models and instances.
VARIABLES = {"$__rate_interval": f"{4 * STEP}s", "$instance": ".*", "$model": ".*"}
COLUMNS, INCHES_PER_COLUMN, INCHES_PER_ROW = 24, 0.68, 0.42
BACKGROUND, PANEL, TEXT, FAINT = "#111217", "#181b1f", "#ccccdc", "#2c3235"
COLOURS = ("#73bf69", "#5794f2", "#f2cc0c", "#ff780a", "#b877d9", "#8ab8ff")
NAMED = {"green": "#73bf69", "yellow": "#f2cc0c", "red": "#f2495c", "blue": "#5794f2"}
NAMED["orange"] = "#ff9830"

ASIDE = {"custom.lineStyle", "custom.axisPlacement"}  # limits, and curves with their own axis

Series = tuple[str, list[float], list[float]]  # legend, minutes before now, values
Area = tuple[list[float], list[float], list[float]]  # minutes before now, floor, top


def query(
    prometheus: str, expr: str, legend: str, minutes: float, until: float | None = None
) -> list[Series]:
    """The series of one query over the `minutes` before `until`, in Unix time; now by default."""
    now = time.time() if until is None else until
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    parameters = {
        "query": expr,
        "start": str(now - minutes * 60),
        "end": str(now),
        "step": str(STEP),
    }
    url = f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310
        result = json.load(response)["data"]["result"]
    found = []
    for series in result:
        labels = series["metric"]
        name = re.sub(r"\{\{(\w+)\}\}", lambda match, of=labels: of.get(match[1], ""), legend)
        times, values = zip(*series["values"], strict=True)
        found.append((name or "value", [(t - now) / 60 for t in times], [float(v) for v in values]))
    return found


def show(unit: str) -> Callable[[float], str]:
    """A function that writes values of a unit as Grafana does."""

    def seconds(value: float) -> str:
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"

    def size(value: float) -> str:
        return (
            f"{value / (1 << 30):.3g} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.3g} MiB"
        )

    writers = {
        "s": seconds,
        "bytes": size,
        "percentunit": lambda value: f"{value * 100:.3g} %",
        "reqps": lambda value: f"{value:.3g} req/s",
    }
    behind = f" {unit.removeprefix('suffix:')}" if unit.startswith("suffix:") else ""

    def plain(value: float) -> str:
        return (f"{value:.3g}" if value < 1000 else f"{value:,.0f}") + behind

    return writers.get(unit, plain)


def draw_number(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    """A large number (or name), in the colour of its threshold, over its curve."""
    defaults = panel["fieldConfig"]["defaults"]
    axes.set_axis_off()
    text, colour = defaults["noValue"], NAMED["green"]
    alive = [series for series in found if series[1][-1] > -2 * STEP / 60]
    if alive:
        name, times, values = alive[0]
        text = show(defaults["unit"])(values[-1])
        for step in defaults.get("thresholds", {}).get("steps", []):
            if step["value"] is None or values[-1] >= step["value"]:
                colour = NAMED[step["color"]]
        if panel["options"]["textMode"] == "name":
            text = name
        else:
            axes.fill_between(times, values, color=colour, alpha=0.15, linewidth=0)
            axes.set_ylim(0, max(*values, 1e-9) * 2.5)
    axes.text(0.5, 0.45, text, transform=axes.transAxes, ha="center", fontsize=19, color=colour)


def overrides(panel: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The special properties of each series, by its name."""
    return {
        override["matcher"]["options"]: {
            item["id"]: item["value"] for item in override["properties"]
        }
        for override in panel["fieldConfig"]["overrides"]
    }


def stacked_up(found: list[Series]) -> list[Area]:
    """Stack each series on those before it, at every step from the first value to the last.

    This is Grafana's way: a series without a value adds nothing if another series has one. If no
    series has a value, there is a gap (`preparePlotData2` in
    packages/grafana-ui/src/components/uPlot).
    """
    start = min((times[0] for _, times, _ in found), default=0.0)
    by_step = [
        {round((time - start) * 60 / STEP): value for time, value in zip(*points, strict=True)}
        for _, *points in found
    ]
    steps = range(1 + max((max(values) for values in by_step), default=-1))
    times = [start + step * STEP / 60 for step in steps]
    top = [0.0 if any(step in values for values in by_step) else math.nan for step in steps]
    areas = []
    for values in by_step:
        floor, top = top, [top[step] + values.get(step, 0.0) for step in steps]
        areas.append((times, floor, top))
    return areas


def draw_curves(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    """Lines over time: some are stacked, limits are dashed, some have an axis on the right."""
    defaults, special = panel["fieldConfig"]["defaults"], overrides(panel)
    stacked = "stacking" in defaults["custom"]
    ordinary = [series for series in found if not ASIDE & special.get(series[0], {}).keys()]
    areas = iter(
        stacked_up(ordinary)
        if stacked
        else [(times, [0.0] * len(times), values) for _, times, values in ordinary]
    )
    right: Axes | None = None
    for number, (name, times, values) in enumerate(found):
        own = special.get(name, {})
        colour = COLOURS[number % len(COLOURS)]
        if "color" in own:
            colour = NAMED[own["color"]["fixedColor"]]
        if "custom.lineStyle" in own:
            axes.plot(times, values, "--", color=colour, linewidth=1, label=name)
            continue
        if "custom.axisPlacement" in own:
            right = right or axes.twinx()
            right.plot(times, values, color=colour, linewidth=1.2)
            axes.plot([], [], color=colour, label=f"{name} (right)")
            finish_axis(right, own["unit"], None)
            right.tick_params(pad=-4)  # inside, because the next panel is beyond the edge
            plt.setp(right.get_yticklabels(), ha="right")
            continue
        along, floor, top = next(areas)
        opacity = defaults["custom"]["fillOpacity"] / 100
        axes.fill_between(
            along,
            floor,
            top,
            color=colour,
            alpha=opacity,
            linewidth=0,
            label=name if stacked else None,
        )
        if not stacked:
            axes.plot(along, top, color=colour, linewidth=1.2, label=name)
    finish_axis(axes, defaults["unit"], defaults.get("max"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g} min"))
    axes.grid(color=FAINT, linewidth=0.6)
    if found:
        axes.legend(fontsize=6.5, ncols=3, frameon=False, labelcolor=TEXT, loc="upper left")


def finish_axis(axes: Axes, unit: str, top: float | None) -> None:
    """An axis from 0 up, in the unit."""
    axes.set_ylim(bottom=0, top=top)
    if axes.get_ylim()[1] < 1e-6:
        axes.set_ylim(0, 1)
    write = show("short" if unit.startswith("suffix:") else unit)  # there is no room for words
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axes.tick_params(colors=TEXT, labelsize=7, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw_bars(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    """A bar for the last value of each series."""
    names = [name for name, _, _ in found]
    values = [series[2][-1] for series in found]
    axes.barh(names, values, color=COLOURS[0], height=0.7)
    axes.set_xlim(0, panel["fieldConfig"]["defaults"].get("max"))
    axes.invert_yaxis()
    write = show(panel["fieldConfig"]["defaults"]["unit"])
    for place, value in enumerate(values):
        axes.text(value, place, f" {write(value)}", va="center", color=TEXT, fontsize=7)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axes.tick_params(colors=TEXT, labelsize=7, length=0)


def draw_heat(axes: Axes, panel: dict[str, Any], found: list[Series]) -> None:
    """Observations per bucket over time, from Prometheus' cumulative series."""
    ordered = sorted(found, key=lambda series: float(series[0]))
    below = [0.0] * len(ordered[0][2]) if ordered else []
    rows = []
    for _, _, values in ordered:
        rows.append([max(value - low, 0) for value, low in zip(values, below, strict=True)])
        below = values
    write = show(panel["fieldConfig"]["defaults"]["unit"])
    bounds = ["∞" if name == "+Inf" else write(float(name)) for name, _, _ in ordered]
    used = [place for place, row in enumerate(rows) if any(row)] or [0]
    low, high = max(used[0] - 1, 0), min(used[-1] + 2, len(rows))
    cells = [[value or float("nan") for value in row] for row in rows[low:high]]
    if cells:
        axes.pcolormesh(
            ordered[0][1], range(high - low), cells, cmap="Oranges_r", shading="nearest"
        )
    axes.set_yticks(range(high - low), bounds[low:high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g} min"))
    axes.tick_params(colors=TEXT, labelsize=7, length=0)


DRAWERS = {
    "stat": draw_number,
    "timeseries": draw_curves,
    "bargauge": draw_bars,
    "heatmap": draw_heat,
}


def draw(
    board: dict[str, Any], prometheus: str, minutes: float, until: float | None = None
) -> Figure:
    """The whole dashboard, with a line at the bottom about this program."""
    height = 1 + max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = plt.figure(
        figsize=(COLUMNS * INCHES_PER_COLUMN, height * INCHES_PER_ROW), facecolor=BACKGROUND
    )
    for panel in board["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / COLUMNS, 1 - place["y"] / height
        wide, high = place["w"] / COLUMNS, place["h"] / height
        if panel["type"] == "row":
            figure.text(left + 0.005, top - high * 0.8, panel["title"], color=TEXT, fontsize=12)
            continue
        margin = 0.004 if panel["type"] == "stat" else 0.034
        axes = figure.add_axes(
            (left + margin, top - high + 0.013, wide - margin - 0.006, high - 0.03), facecolor=PANEL
        )
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_title(
            panel["title"],
            color=TEXT,
            fontsize=9,
            loc="left",
            y=1.0,
            pad=-9 if panel["type"] == "stat" else 4,
        )
        found = [
            series
            for target in panel["targets"]
            for series in query(prometheus, target["expr"], target["legendFormat"], minutes, until)
        ]
        DRAWERS[panel["type"]](axes, panel, found)
    note = "drawn by grafana/picture.py (matplotlib) from the dashboard's own queries, no Grafana"
    figure.text(0.998, 0.002, note, color=TEXT, fontsize=7, ha="right", va="bottom")
    return figure


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dashboard", default="healthy")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--until", type=float, metavar="UNIX TIME", help="default: now")
    parser.add_argument("--output", type=Path, default=Path("dashboard.png"))
    options = parser.parse_args()
    board = json.loads((FOLDER / "dashboards" / f"{options.dashboard}.json").read_text("utf-8"))
    figure = draw(board, options.prometheus, options.minutes, options.until)
    figure.savefig(options.output, dpi=80)


if __name__ == "__main__":
    main()
