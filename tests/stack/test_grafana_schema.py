"""Dashboards against the types that Grafana publishes, checked by the TypeScript compiler.

Needs npm and a registry; skipped, saying so, without. The generator's own types (the SDK's) are
checked when it runs; these are of the Grafana that compose.yaml starts.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.stack import queries
from tests.stack.support import ROOT, run

pytestmark = pytest.mark.e2e
MISSING = "NO DASHBOARD WAS CHECKED AGAINST GRAFANA'S TYPES: "
TYPESCRIPT = "5.9"
FLAGS = "--noEmit --strict --skipLibCheck --moduleResolution bundler --module esnext"


def grafana_version() -> str:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    (version,) = re.findall(r":(\d+\.\d+\.\d+)$", services["grafana"]["image"])
    return str(version)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Grafana's types and the compiler in node_modules."""
    if shutil.which("npm") is None:
        pytest.skip(f"{MISSING}no npm")
    folder = tmp_path_factory.mktemp("types")
    (folder / "package.json").write_text('{"private": true}')
    wanted = [f"@grafana/schema@{grafana_version()}", f"typescript@{TYPESCRIPT}"]
    flags = ("--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", folder)
    installed = run("npm", "install", *flags, *wanted, timeout=300)
    if installed.returncode:
        pytest.skip(f"{MISSING}npm cannot get them: {installed.stderr[-200:]}")
    return folder


def complaints(folder: Path, boards: dict[str, object]) -> str:
    """What the compiler says about the dashboards; empty where they fit."""
    source = (ROOT / "grafana" / "schema.ts").read_text()
    for name, board in boards.items():
        source += f"export const {name}: Board = {json.dumps(board)};\n"
    (folder / "boards.ts").write_text(source)
    compiler = folder / "node_modules" / ".bin" / "tsc"
    return run(compiler, *FLAGS.split(), folder / "boards.ts", timeout=300).stdout


def test_dashboards_are_what_grafana_takes(packages: Path) -> None:
    assert complaints(packages, dict(queries.boards())) == ""


def test_what_grafana_does_not_take_is_found(packages: Path) -> None:
    board = queries.boards()["healthy"]
    said = complaints(packages, {"misspelt": board | {"refesh": "5s"}})
    assert "refesh" in said
    wrong = board | {"links": [board["links"][0] | {"type": "dashboard"}]}
    assert '"dashboard"' in complaints(packages, {"wrong": wrong})
