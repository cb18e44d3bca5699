"""Child processes run our modules, whatever lies in the working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from specops.models.child import ChildError, run_module


def test_no_module_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who starts the service in a cloned repository must not run what is in it."""
    for name in ("numpy.py", "json.py", "specops.py"):
        (tmp_path / name).write_text("from pathlib import Path\nPath('was run').touch()\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChildError, match="nowhere is not a folder"):
        run_module("specops.models.convert", "nowhere", "out", "--quant", "fp32")
    assert not (tmp_path / "was run").exists()
