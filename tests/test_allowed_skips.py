"""A run that must leave no test out fails for one that is skipped, whichever process skipped it."""

import sys
from pathlib import Path

import pytest

from tests.stack.support import ROOT, run

NO_ENGINE = "NO CONTAINER WAS TESTED: No Docker Engine can run here: "
FILES = {
    "conftest.py": "from tests.allowed_skips import watch_skips as pytest_configure\n",
    "test_one.py": "import pytest\n\n\ndef test_one():\n    pytest.skip({!r})\n",
    "test_module.py": "import pytest\n\npytest.importorskip('no_such_module')\n",
    "test_other.py": "def test_other():\n    pass\n",
}


@pytest.mark.parametrize(
    ("left_out", "reason", "strict", "named"),
    [
        ("test_one.py", "no Chromium", "1", ["test_one.py::test_one: no Chromium"]),
        ("test_module.py", "no Chromium", "1", ["test_module.py: could not import"]),
        ("test_one.py", "no Chromium", "", []),
        ("test_one.py", "not this processor", "1", []),
        ("test_one.py", f"{NO_ENGINE}it takes root", "1", []),
        ("test_one.py", f"{NO_ENGINE}process 7 uses the one at unix:///x", "1", ["test_one.py"]),
    ],
)
def test_a_test_that_is_left_out_fails_a_strict_run(
    tmp_path: Path, left_out: str, reason: str, strict: str, named: list[str]
) -> None:
    for name in ("conftest.py", "test_other.py", left_out):
        (tmp_path / name).write_text(FILES[name].format(reason))
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", "-n", "1"]
    done = run(*command, tmp_path, env={**plugins, "STRICT_SKIPS": strict})
    assert done.returncode == bool(named), done.stdout + done.stderr
    _, heading, lines = done.stdout.partition("not in tests/allowed_skips.py")
    assert bool(heading) == bool(named)
    assert all(line in lines for line in named)
