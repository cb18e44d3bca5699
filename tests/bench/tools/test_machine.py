"""A result says where it was measured, on machines that tell little, too."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import onnxruntime
import pytest

from bench.tools import machine


def test_the_description_fits_json_and_names_what_was_measured() -> None:
    described = machine.describe()
    assert json.loads(json.dumps(asdict(described)))["onnxruntime"] == onnxruntime.__version__
    assert 0 < described.memory_limit_bytes <= described.memory_bytes
    assert described.threads >= 1
    assert f"onnxruntime {onnxruntime.__version__}" in described.line


def test_a_commit_with_changes_on_top_is_marked() -> None:
    clean = replace(machine.describe(), commit="0123456789abcdef", modified=False)
    assert "commit 0123456789," in clean.line
    assert "commit 0123456789+," in replace(clean, modified=True).line
    assert "commit" not in replace(clean, commit=None).line


def test_processor_and_flags_come_from_the_first_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Fast One\nflags\t\t: fma avx2\n\nmodel name\t: Other\n")
    assert machine._cpu(cpuinfo) == ("Fast One", frozenset({"fma", "avx2"}))


def test_a_machine_without_cpuinfo_still_has_a_name(tmp_path: Path) -> None:
    name, flags = machine._cpu(tmp_path / "missing")
    assert name
    assert not flags


@pytest.mark.parametrize(
    ("text", "mode"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never", "always")],
)
def test_the_chosen_mode_of_huge_pages_is_read(tmp_path: Path, text: str, mode: str) -> None:
    setting = tmp_path / "enabled"
    setting.write_text(text)
    assert machine._huge_pages(setting) == mode
    assert machine._huge_pages(tmp_path / "missing") == "unknown"


def test_the_command_is_what_was_asked_for_and_not_where_it_went() -> None:
    asked = ["equality", "--seconds", "150", "--results", "/somewhere", "--quick"]
    assert machine._command(asked) == "python -m bench equality --seconds 150 --quick"
