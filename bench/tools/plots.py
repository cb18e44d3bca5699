"""Draws charts (`report.Chart`) as SVG."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from bench.tools.report import Chart

# Colours that colour-blind people can tell apart (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8a8a00", "#000000")
_MARKS = "osv^DPX*"
_WIDTH, _HEIGHT = 6.4, 4.4
# No date and no random ids: the same figures give the same file.
_SVG: dict[Any, Any] = {"svg.hashsalt": "specops", "svg.fonttype": "path"}


def figure(charts: Sequence[Chart]) -> Figure:
    """All charts side by side."""
    drawn = Figure(figsize=(_WIDTH * len(charts), _HEIGHT), layout="constrained")
    for chart, axes in zip(charts, drawn.subplots(1, len(charts), squeeze=False)[0], strict=True):
        places, width = np.arange(len(chart.places)), 0.8 / len(chart.series)
        for number, series in enumerate(chart.series):
            look = {"label": series.name, "color": _COLOURS[number % len(_COLOURS)]}
            if not chart.places:
                axes.plot(series.across, series.values, _MARKS[number % len(_MARKS)], **look)
                axes.set_xlim(left=0)
                continue
            values = np.array(series.values)
            errors = np.stack([values - series.low, series.high - values]).clip(min=0)
            shifted = places + (number - (len(chart.series) - 1) / 2) * width
            lines = {"elinewidth": 0.8, "capsize": 2}
            axes.bar(shifted, values, width, yerr=errors, error_kw=lines, **look)
        if chart.level is not None:
            axes.axhline(chart.level, color="#888888", linewidth=1, linestyle="--", zorder=1)
        if chart.places:
            axes.set_xticks(places, chart.places)
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
