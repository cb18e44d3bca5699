"""The TypeScript compiler checks the dashboards against the types that Grafana publishes.

Needs npm and a registry; skipped without. The generator checks the types of its SDK when it runs;
these are the types of the Grafana that compose.yaml starts.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.stack import queries
from tests.stack.support import ROOT, read_yaml, run

pytestmark = pytest.mark.e2e
MISSING = "NO DASHBOARD WAS CHECKED AGAINST GRAFANA'S TYPES: "
TYPESCRIPT = "5.9"
FLAGS = "--noEmit --strict --skipLibCheck --moduleResolution bundler --module esnext"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Grafana's types and the compiler in node_modules."""
    if shutil.which("npm") is None:
        pytest.skip(f"{MISSING}no npm")
    folder = tmp_path_factory.mktemp("types")
    (folder / "package.json").write_text('{"private": true}')
    image = read_yaml("compose.yaml")["services"]["grafana"]["image"]
    (version,) = re.findall(r":(\d+\.\d+\.\d+)$", image)
    wanted = [f"@grafana/schema@{version}", f"typescript@{TYPESCRIPT}"]
    flags = ("--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", folder)
    installed = run("npm", "install", *flags, *wanted, timeout=300)
    if installed.returncode:
        pytest.skip(f"{MISSING}npm cannot get them: {installed.stderr[-200:]}")
    return folder


def complaints(folder: Path, boards: dict[str, object]) -> str:
    """What the compiler says about the dashboards; empty if it accepts them."""
    source = (ROOT / "grafana" / "schema.ts").read_text()
    for name, board in boards.items():
        source += f"export const {name}: Board = {json.dumps(board)};\n"
    (folder / "boards.ts").write_text(source)
    compiler = folder / "node_modules" / ".bin" / "tsc"
    return run(compiler, *FLAGS.split(), folder / "boards.ts", timeout=300).stdout


def test_grafanas_types_accept_the_dashboards_and_refuse_a_wrong_one(packages: Path) -> None:
    assert complaints(packages, dict(queries.boards())) == ""
    board = queries.boards()["healthy"]
    assert "refesh" in complaints(packages, {"misspelt": board | {"refesh": "5s"}})
    wrong = board | {"links": [board["links"][0] | {"type": "dashboard"}]}
    assert '"dashboard"' in complaints(packages, {"wrong": wrong})
