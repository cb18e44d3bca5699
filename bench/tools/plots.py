"""Draws charts (`report.Chart`) as SVG."""

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from bench.tools.report import Chart

# Colours that colour-blind people can tell apart (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8a8a00", "#000000")
_MARKS = "osv^DPX*"
# No date and no random ids: the same figures give the same file.
_SVG: dict[Any, Any] = {"svg.hashsalt": "specops", "svg.fonttype": "path"}


def save(stem: Path, chart: Chart) -> Path:
    """Draw a chart into `stem`.svg and return its path."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for number, (name, (across, up)) in enumerate(chart.points.items()):
        colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
        axes.plot([across], [up], mark, label=name, color=colour)
    axes.set(xlabel=chart.across, ylabel=chart.up)
    axes.set_title(chart.title, fontsize="medium")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")
    text = io.StringIO()
    with matplotlib.rc_context(_SVG):
        figure.savefig(text, format="svg", metadata={"Date": None})
    picture = stem.with_suffix(".svg")
    lines = text.getvalue().splitlines()
    picture.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    return picture
