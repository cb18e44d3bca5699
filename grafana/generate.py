"""Writes the dashboards that Grafana is provisioned with: `python grafana/generate.py [--check]`.

The dashboards are written in Python (grafana/panels.py has the building blocks) and committed as
JSON, so that a running stack needs no generator. `--check` writes nothing and fails if both differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

import capacity
import healthy
import latency
import speculation
from scripts.generated import update

LINE = 100  # characters
FOLDER = Path(__file__).parent / "dashboards"
DASHBOARDS = {
    f"{module.__name__}.json": module.build for module in (healthy, speculation, latency, capacity)
}


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


if __name__ == "__main__":
    strangers = [path for path in FOLDER.glob("*.json") if path.name not in DASHBOARDS]
    for path in strangers:
        print(f"{path} has no generator", file=sys.stderr)
    made = {FOLDER / name: _written(build()) + "\n" for name, build in DASHBOARDS.items()}
    sys.exit(update(made, "grafana/generate.py") or bool(strangers))
