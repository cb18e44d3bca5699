"""Child processes run our modules, whatever lies in the working directory."""

from pathlib import Path

import pytest

from specops.models.child import ChildError, one_child, run_module
from specops.system.folders import locked

# Prints the process, its argument and how many files it has open.
PROGRAM = """
import os, sys
def main(arguments):
    print(os.getpid(), *arguments, len(os.listdir("/dev/fd")))
    print("no", *arguments, file=sys.stderr)
    return int(arguments == ["3"])
"""


def test_no_module_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who starts the service in a cloned repository must not run what is in it."""
    for name in ("numpy.py", "json.py", "specops.py"):
        (tmp_path / name).write_text("from pathlib import Path\nPath('was run').touch()\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChildError, match="nowhere is not a folder"):
        run_module("specops.models.convert.__main__", "nowhere", "out", "--quant", "fp32")
    assert not (tmp_path / "was run").exists()


def test_one_process_runs_all_modules_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock ends with the module that it was for, and an error with its own."""
    package = tmp_path / "odd"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said: list[str] = []
    with one_child(), locked(tmp_path / "here") as lock:
        run_module("odd.module", "1", lock=lock, tell=said.append)
        run_module("odd.module", "2", tell=said.append)
        with pytest.raises(ChildError, match=r"^no 3$"):
            run_module("odd.module", "3", tell=said.append)
        run_module("odd.module", "4", tell=said.append)
    run_module("odd.module", "5", tell=said.append)
    first, second, third, fourth, fifth = (line.split() for line in said)
    assert first[0] == second[0] == third[0]
    assert len({third[0], fourth[0], fifth[0]}) == 3
    assert [line[1] for line in (first, second, third, fourth, fifth)] == ["1", "2", "3", "4", "5"]
    assert int(first[2]) == int(second[2]) + 1
