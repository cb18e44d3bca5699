"""Draws charts as SVG. What is drawn is data: `report.Chart`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.tools.report import Chart, Series

# Told apart by people who see colours differently, too (Okabe and Ito, 2008).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8a8a00", "#000000")
_MARKS = "osv^DPX*"
_WIDTH, _HEIGHT = 6.4, 4.4
_ABREAST = 4  # more charts than these stand in pairs below each other, and are lower
_PAIR_HEIGHT = 2.8
_SPARSE = 40  # places: more of them are too close to each other for marks
# No date and no random ids: the same figures give the same file.
_SVG = {"svg.hashsalt": "specops", "svg.fonttype": "path"}


def figure(charts: Sequence[Chart]) -> Figure:
    """All charts side by side, or pair by pair where they are many."""
    across, height = (len(charts), _HEIGHT) if len(charts) <= _ABREAST else (2, _PAIR_HEIGHT)
    down = -(-len(charts) // across)
    drawn = Figure(figsize=(_WIDTH * across, height * down), layout="constrained")
    for place, chart in enumerate(charts, start=1):
        axes = drawn.add_subplot(down, across, place)
        draw = {"lines": _line, "bars": _bars, "points": _points}[chart.kind]
        for number, series in enumerate(chart.series):
            draw(axes, chart, series, number)
        if chart.level is not None:
            axes.axhline(chart.level, color="#888888", linewidth=1, linestyle="--", zorder=1)
        named = [place for place, name in enumerate(chart.places) if name]
        if named:
            axes.set_xticks(named, [chart.places[place] for place in named])
        axes.set_xlabel(chart.across)
        axes.set_ylabel(chart.up)
        axes.set_title(chart.title, fontsize="medium")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small")
    return drawn


def save(stem: Path, charts: Sequence[Chart]) -> Path:
    """Write `stem`.svg; returns it."""
    text = io.StringIO()
    with matplotlib.rc_context(_SVG):  # type: ignore[arg-type]  # the keys are literals
        figure(charts).savefig(text, format="svg", metadata={"Date": None})
    picture = stem.with_suffix(".svg")
    lines = text.getvalue().splitlines()
    picture.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    return picture


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _errors(series: Series) -> np.ndarray | None:
    """[2, places]: how far the quartiles are from the value."""
    if not series.low:
        return None
    middle = _numbers(series.values)
    return np.stack([middle - _numbers(series.low), _numbers(series.high) - middle]).clip(min=0)


def _line(axes: Axes, chart: Chart, series: Series, number: int) -> None:
    axes.errorbar(
        range(len(chart.places)),
        _numbers(series.values),
        yerr=_errors(series),
        label=series.name,
        color=_COLOURS[number % len(_COLOURS)],
        marker=_MARKS[number % len(_MARKS)] if len(chart.places) <= _SPARSE else "",
        markersize=5,
        capsize=2,
        elinewidth=0.8,
    )


def _bars(axes: Axes, chart: Chart, series: Series, number: int) -> None:
    width = 0.8 / len(chart.series)
    axes.bar(
        np.arange(len(chart.places)) + (number - (len(chart.series) - 1) / 2) * width,
        _numbers(series.values),
        width,
        yerr=_errors(series),
        label=series.name,
        color=_COLOURS[number % len(_COLOURS)],
        error_kw={"elinewidth": 0.8, "capsize": 2},
    )


def _points(axes: Axes, chart: Chart, series: Series, number: int) -> None:
    where, values = series.across, _numbers(series.values)
    axes.plot(
        where,
        values,
        _MARKS[number % len(_MARKS)],
        label=series.name,
        color=_COLOURS[number % len(_COLOURS)],
    )
    axes.set_xlim(left=0)
