"""Charts become pictures, and all results one page that needs nothing else."""

import re
from pathlib import Path

import pytest

from bench.tools.page import write_page
from bench.tools.plots import save
from bench.tools.report import Chart, Outcome, Table, write

TABLE = Table("Speed <of> all", ("side", "tok/s"), [("a & b", "9.5")], ("a note",))
CHART = Chart("Quality", "ms per token", "mean KL", {"int8": (1.5, 0.01), "int4": (1.0, 0.1)})
MACHINE = {
    "command": "python -m bench x", "cpu": "a cpu", "threads": 2, "onnxruntime": "1", "date": "now",
}  # fmt: skip


def test_the_page_holds_every_result_and_asks_for_nothing(tmp_path: Path) -> None:
    about = {"quick": False, "machine": MACHINE}
    for name in ("gamma", "compare"):
        write(tmp_path, name, about, Outcome({}, [TABLE], CHART), "here")
    picture = save(tmp_path / "compare", CHART)
    assert picture.read_text().startswith("<?xml")
    (tmp_path / "other.json").write_text("{}")  # holds no tables
    text = write_page(tmp_path).read_text()
    assert text.index('<h2 id="compare">') < text.index('<h2 id="gamma">')
    assert "Speed &lt;of&gt; all" in text
    assert "a &amp; b" in text
    assert "python -m bench x" in text
    assert text.count("<img") == 1
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    assert "<script" not in text


def test_without_results_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="measure something first"):
        write_page(tmp_path)
