"""Charts become pictures, and all results one page that needs nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.tools.page import write_page
from bench.tools.plots import figure, save
from bench.tools.report import Chart, Outcome, Series, Table, write

TABLE = Table("Speed <of> all", ("side", "tok/s"), [("a & b", "9.5")], ("a note",))
CHART = Chart(
    "Speed", "lines", "k", "times plain", ["0", "1"],
    [Series("suffix", [1.0, 1.5], [0.9, 1.4], [1.1, 1.6]), Series("draft", [None, 0.9])], level=1.0,
)  # fmt: skip
OUTCOME = Outcome({}, [TABLE], [CHART])
MACHINE = {
    "command": "python -m bench x", "cpu": "a cpu", "threads": 2, "onnxruntime": "1", "date": "now",
}  # fmt: skip


def test_a_chart_is_kept_as_png_and_svg(tmp_path: Path) -> None:
    png, vector = save(tmp_path / "chart", [CHART, replace(CHART, kind="bars")])
    assert png.read_bytes().startswith(b"\x89PNG")
    assert vector.read_text().startswith("<svg")
    assert vector.read_text().endswith("</svg>\n")


def test_a_chart_shows_every_series_and_the_level_to_compare_with() -> None:
    (axes,) = figure([CHART]).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["suffix", "draft"]
    assert any(list(line.get_ydata()) == [1.0, 1.0] for line in axes.lines)


def test_the_page_holds_every_result_and_asks_for_nothing(tmp_path: Path) -> None:
    for name in ("gamma", "compare"):
        write(tmp_path, name, {"quick": False, "machine": MACHINE}, OUTCOME, "here")
    (tmp_path / "other.json").write_text("{}")  # holds no tables
    text = write_page(tmp_path).read_text()
    assert text.index('<h2 id="compare">') < text.index('<h2 id="gamma">')
    assert "Speed &lt;of&gt; all" in text
    assert "a &amp; b" in text
    assert "python -m bench x" in text
    assert text.count("<svg") == 2
    assert not re.search(r'(src|href)="(?!#)', text.replace("xlink:href", "href"))
    assert "<script" not in text


def test_ids_on_the_page_are_unique_and_what_is_referred_to_is_there(tmp_path: Path) -> None:
    for name in ("gamma", "compare"):
        write(tmp_path, name, {"quick": True, "machine": MACHINE}, OUTCOME, "here")
    text = write_page(tmp_path).read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)


def test_without_results_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="measure something first"):
        write_page(tmp_path)
