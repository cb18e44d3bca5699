"""Writes the dashboards that Grafana is provisioned with: `python grafana/generate.py [--check]`.

The dashboards are written in Python (grafana/panels.py has the building blocks) and committed as
JSON, so that a running stack needs no generator. `--check` writes nothing and fails if both differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

import capacity
import healthy
import latency
import speculation
import spread
from board import MARKS

FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = {
    f"{module.__name__}.json": module.build
    for module in (healthy, speculation, latency, capacity, spread)
}


def render(name: str) -> str:
    """The JSON text of one dashboard, its panels numbered from 1."""
    board: dict[str, Any] = json.loads(
        JSONEncoder(sort_keys=True).encode(DASHBOARDS[name]().build())
    )
    board["id"] = None  # Grafana's own number; a provisioned dashboard has none
    _clean(board)
    for number, panel in enumerate(board["panels"], start=1):
        panel["id"] = number
    return json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _clean(board: dict[str, Any]) -> None:
    """Correct what the SDK writes differently from Grafana's types, which tests compare with."""
    board.pop("style", None)  # of an older Grafana
    for variable in board["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min", "id"):  # of other kinds of variables
            variable.pop(name, None)
    for panel in board["panels"]:
        if panel["type"] == "heatmap":
            panel["options"]["tooltip"] = {"mode": "single"}  # the SDK's `show` is gone
    for mark in board["annotations"]["list"]:  # the SDK knows only Grafana's own annotations
        # Without an interval Grafana asks for a value a minute: too late for what is unreachable.
        mark["target"] = {"expr": mark.pop("expr"), "refId": "Anno", "interval": "5s"}
        mark["titleFormat"], mark["textFormat"] = MARKS[mark["name"]]


def main() -> int:
    """Write or check all dashboards; the exit status is 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [
        name
        for name in DASHBOARDS
        if not (FOLDER / name).exists() or (FOLDER / name).read_text("utf-8") != render(name)
    ]
    strangers = [path for path in FOLDER.glob("*.json") if path.name not in DASHBOARDS]
    for path in strangers:
        print(f"{path} has no generator", file=sys.stderr)
    for name in stale:
        if check:
            print(f"{FOLDER / name} differs from the generator's output", file=sys.stderr)
        else:
            (FOLDER / name).write_text(render(name), "utf-8")
    return 1 if strangers or (check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
