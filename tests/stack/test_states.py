"""The dashboards of a real service: idle, loaded, overloaded, and after its process was killed."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import pytest

from scripts.browser import BrowserError, executable
from tests.stack import queries
from tests.stack.support import ROOT, run, tool

pytestmark = pytest.mark.e2e
ALIVE, DEAD = ("idle", "load", "overload"), ("dead-for-15-s", "outage")
Reports = dict[str, dict[str, Any]]  # by dashboard
MINUTES = 0.5  # each state


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reports]:
    """What the pages report in each state: the panels' texts, names and scales."""
    try:
        executable()
    except BrowserError as missing:
        pytest.skip(f"NO STATE WAS DRAWN: {missing}")
    packages = ROOT / "grafana" / "draw" / "node_modules" / ".package-lock.json"
    if tool("prometheus") is None or shutil.which("npm") is None or not packages.exists():
        pytest.skip("NO STATE WAS DRAWN: it needs Prometheus and `npm ci --prefix grafana/draw`")
    folder = tmp_path_factory.mktemp("states")
    options = ("--minutes", MINUTES, "--output", folder)
    done = run(sys.executable, "grafana/draw/states.py", *options, timeout=1200)
    assert (done.returncode, done.stderr) == (0, "")
    return {
        state: {
            name: json.loads((folder / state / f"{name}.json").read_text(encoding="utf-8"))
            for name in queries.boards()
        }
        for state in (*ALIVE, *DEAD)
    }


def saying(reports: Reports, word: str) -> dict[str, list[str]]:
    """The panels of each dashboard that show a word."""
    return {
        name: [panel["title"] for panel in report["panels"] if word in panel["text"]]
        for name, report in reports.items()
    }


def test_every_page_says_within_15_seconds_that_the_service_is_dead(
    states: dict[str, Reports],
) -> None:
    for state in DEAD:
        found = saying(states[state], "unreachable")
        assert [name for name, panels in found.items() if not panels] == [], state
    for state in ALIVE:
        assert not any(saying(states[state], "unreachable").values()), state


def test_idle_and_loaded_look_different(states: dict[str, Reports]) -> None:
    idle, load = (saying(states[state], "no traffic") for state in ("idle", "load"))
    assert all(len(load[name]) < len(idle[name]) for name in idle if name != "capacity")
