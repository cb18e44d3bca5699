"""Draws charts (`report.Chart`) as SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.tools.report import Chart, Series

# Colours that colour-blind people can tell apart (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8a8a00", "#000000")
_MARKS = "osv^DPX*"
_WIDTH, _HEIGHT = 6.4, 4.4
_ABREAST = 4  # if there are more charts, they stand in pairs below each other, and are lower
_PAIR_HEIGHT = 2.8
_SPARSE = 40  # with more places than these, marks would be too close to each other
# No date and no random ids: the same figures give the same file.
_SVG: dict[Any, Any] = {"svg.hashsalt": "specops", "svg.fonttype": "path"}


def figure(charts: Sequence[Chart]) -> Figure:
    """All charts side by side, or in pairs if there are many."""
    across, height = (len(charts), _HEIGHT) if len(charts) <= _ABREAST else (2, _PAIR_HEIGHT)
    down = -(-len(charts) // across)
    drawn = Figure(figsize=(_WIDTH * across, height * down), layout="constrained")
    for place, chart in enumerate(charts, start=1):
        axes = drawn.add_subplot(down, across, place)
        for number, series in enumerate(chart.series):
            _draw(axes, chart, series, number)
        if chart.level is not None:
            axes.axhline(chart.level, color="#888888", linewidth=1, linestyle="--", zorder=1)
        if named := [place for place, name in enumerate(chart.places) if name]:
            axes.set_xticks(named, [chart.places[place] for place in named])
        axes.set(xlabel=chart.across, ylabel=chart.up)
        axes.set_title(chart.title, fontsize="medium")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small")
    return drawn


def save(stem: Path, charts: Sequence[Chart]) -> Path:
    """Write `stem`.svg and return its path."""
    text = io.StringIO()
    with matplotlib.rc_context(_SVG):
        figure(charts).savefig(text, format="svg", metadata={"Date": None})
    picture = stem.with_suffix(".svg")
    lines = text.getvalue().splitlines()
    picture.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    return picture


def _draw(axes: Axes, chart: Chart, series: Series, number: int) -> None:
    values = np.array(series.values, dtype=float)  # None becomes NaN
    errors = None  # [2, places]: distances of the quartiles from the value
    if series.low:
        errors = np.stack([values - series.low, np.subtract(series.high, values)]).clip(min=0)
    look: dict[str, Any] = {"label": series.name, "color": _COLOURS[number % len(_COLOURS)]}
    mark, places = _MARKS[number % len(_MARKS)], np.arange(len(chart.places))
    if chart.kind == "bars":
        width = 0.8 / len(chart.series)
        bars = {"elinewidth": 0.8, "capsize": 2}
        shifted = places + (number - (len(chart.series) - 1) / 2) * width
        axes.bar(shifted, values, width, yerr=errors, error_kw=bars, **look)
    elif chart.kind == "points":
        axes.plot(series.across, values, mark, **look)
        axes.set_xlim(left=0)
    else:
        look |= {"marker": mark if len(places) <= _SPARSE else "", "markersize": 5}
        axes.errorbar(places, values, yerr=errors, capsize=2, elinewidth=0.8, **look)
