"""Writes the dashboards that Grafana is provisioned with: `python grafana/generate.py [--check]`.

The dashboards are written in Python (grafana/panels.py has the building blocks) and committed as
JSON, so that a running stack needs no generator. `--check` writes nothing and fails if both differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

import capacity
import healthy
import latency
import speculation
from board import MARKS, READY
from scripts.generated import update

WIDTH = 24  # columns of Grafana's grid
LINE = 100  # characters
FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = {
    f"{module.__name__}.json": module.build for module in (healthy, speculation, latency, capacity)
}


def render(name: str) -> str:
    """The JSON text of one dashboard, its panels numbered from 1."""
    board: dict[str, Any] = json.loads(
        JSONEncoder(sort_keys=True).encode(DASHBOARDS[name]().build())
    )
    board["id"] = None  # Grafana's own number; a provisioned dashboard has none
    _clean(board)
    _place(board["panels"], 0)
    for number, panel in enumerate(_all(board), start=1):
        panel["id"] = number
    return _written(board) + "\n"


def _all(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The panels and rows, those in folded rows included."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def _place(panels: list[dict[str, Any]], top: int) -> None:
    """Lay the panels out from left to right, from `top` on; what a folded row holds, below it.

    The SDK leaves room for what is folded.
    """
    left, height = 0, 0
    for panel in panels:
        grid = panel["gridPos"]
        if left + grid["w"] > WIDTH:
            left, top, height = 0, top + height, 0
        grid["x"], grid["y"] = left, top
        left, height = left + grid["w"], max(height, grid["h"])
        _place(panel.get("panels", []), top + 1)


def _written(value: Any, indent: str = "") -> str:
    """JSON in which a list or an object stands on one line if that is short enough."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= LINE:
        return line
    inner = indent + "  "
    if isinstance(value, list):
        items = [_written(item, inner) for item in value]
    else:
        items = [f"{json.dumps(key)}: {_written(value[key], inner)}" for key in sorted(value)]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"


def _clean(board: dict[str, Any]) -> None:
    """Correct what the SDK writes differently from Grafana's types, which tests compare with."""
    board.pop("style", None)  # of an older Grafana
    for variable in board["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min", "id"):  # of other kinds of variables
            variable.pop(name, None)
    for panel in _all(board):
        if panel["type"] == "heatmap":
            panel["options"]["tooltip"] = {"mode": "single"}  # the SDK's `show` is gone
    for mark in board["annotations"]["list"]:  # the SDK knows only Grafana's own annotations
        # Without an interval Grafana asks for a value a minute: too late for what is unreachable.
        mark["target"] = {"expr": mark.pop("expr"), "refId": "Anno", "interval": "5s"}
        mark["titleFormat"], mark["textFormat"] = MARKS[mark["name"]]
        if mark["name"] == READY:
            mark["useValueForTime"] = True


if __name__ == "__main__":
    strangers = [path for path in FOLDER.glob("*.json") if path.name not in DASHBOARDS]
    for path in strangers:
        print(f"{path} has no generator", file=sys.stderr)
    made = {FOLDER / name: render(name) for name in DASHBOARDS}
    sys.exit(update(made, "grafana/generate.py") or bool(strangers))
